"""What reads a model's tokens into text, reasoning and calls of tools."""
