"""LoRA adapters of requests: which there are, and which of them the shards hold at the moment."""
