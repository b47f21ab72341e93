"""Formats with tags around each argument."""
