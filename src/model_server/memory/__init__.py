"""A device's memory: the paged KV cache, its size, what the rest is used for."""
