"""What each row's own LoRA adapter adds to a product."""
