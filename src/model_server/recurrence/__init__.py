"""Layers that read a few inputs, or a state, of the tokens before."""
