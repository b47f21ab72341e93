"""Attention of a decoder's blocks: multi-head with grouped KV heads, and multi-head latent attention."""
