"""Families whose layers mostly lack attention."""
