"""Vectors and scores of hidden states, instead of tokens."""
