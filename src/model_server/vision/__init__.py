"""Images: what is known of them, the tower that encodes them, where their embeddings go."""
