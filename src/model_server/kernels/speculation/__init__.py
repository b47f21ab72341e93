"""Kernels of drafting."""
