"""The machine that processes share: what it has, and how much of it a KV cache takes."""
