"""Grammars: whether one can be had, compiled in a bounded process of its own."""
