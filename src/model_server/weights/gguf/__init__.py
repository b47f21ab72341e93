"""GGUF files under transformers' names and order of rows."""
