"""Older formats made into safetensors and tokenizer.json, in separate processes."""
