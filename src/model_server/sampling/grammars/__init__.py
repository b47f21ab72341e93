"""Grammars as automata beside their rows."""
