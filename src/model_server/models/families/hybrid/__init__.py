"""Families with something else than attention in most of their layers."""
