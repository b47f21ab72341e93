"""Kernels that make keys and values and store them in the cache."""
