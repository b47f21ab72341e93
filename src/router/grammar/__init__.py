"""Clients' grammars, checked in bounded processes."""
