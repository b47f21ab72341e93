"""What LoRA adapters add to a product: for each row those of its own adapter."""
