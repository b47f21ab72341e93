"""Formats with the name in front of the JSON of the arguments."""
