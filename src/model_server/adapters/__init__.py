"""LoRA adapters: what their folders hold, and which rows of a forward get which of them."""
