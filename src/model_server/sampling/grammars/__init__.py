"""Grammars as automata beside the rows that they constrain."""
