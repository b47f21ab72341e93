"""A device's memory: KV cache, its size, other uses."""
