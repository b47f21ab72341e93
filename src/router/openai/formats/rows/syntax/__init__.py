"""Formats with a syntax of their own for calls and values."""
