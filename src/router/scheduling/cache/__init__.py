"""KV blocks and the prefix cache: which request holds which block."""
