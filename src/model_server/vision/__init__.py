"""Images: facts, tower, and where embeddings go."""
