"""Vectors and scores instead of tokens: what is done with the hidden states of a model."""
