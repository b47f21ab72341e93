"""Decides which request runs next."""
