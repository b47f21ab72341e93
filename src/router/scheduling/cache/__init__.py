"""KV blocks and the prefix cache: who holds which block."""
