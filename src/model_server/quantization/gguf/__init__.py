"""Blocks of GGUF files as codes, scales and offsets."""
