"""What guesses tokens by computing: a small model, or heads on the hidden states of the model they are made for."""
