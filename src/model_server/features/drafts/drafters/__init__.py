"""What guesses by computing: a small model, or heads on hidden states."""
