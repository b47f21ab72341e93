"""Waiting requests, and how many join."""
