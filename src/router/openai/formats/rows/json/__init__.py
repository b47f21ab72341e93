"""Formats whose calls are JSON objects with the name in them."""
