"""LoRA adapters in place of a model, and the messages by which the router has shards load and drop adapters."""
