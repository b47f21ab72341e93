"""Products of a model with LoRA adapters, in place of its own."""
