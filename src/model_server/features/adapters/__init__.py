"""LoRA adapters of requests: those loaded with the model, and those that come while it serves."""
