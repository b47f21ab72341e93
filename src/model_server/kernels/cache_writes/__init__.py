"""Kernels that store keys and values in the cache."""
