"""Layers whose tokens read a few inputs, or a state, of the tokens before them."""
