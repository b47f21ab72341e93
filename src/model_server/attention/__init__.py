"""Attention over the paged KV cache: one interface, several backends, plain torch as the ground truth."""
