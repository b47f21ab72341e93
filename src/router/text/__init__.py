"""The router's view of the model's tokenizer and files."""
