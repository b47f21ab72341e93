"""LoRA adapters as models, and messages that load and drop them."""
