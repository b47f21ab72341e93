"""Grammars of clients, checked in a bounded process of their own."""
