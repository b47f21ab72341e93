"""Texts per second of a published embedding model, beside other engines."""
