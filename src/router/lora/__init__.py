"""LoRA adapters of requests, known and loaded."""
