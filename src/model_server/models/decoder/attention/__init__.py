"""Attention of a decoder's blocks: grouped-query and latent."""
