"""Embeddings, reranking and classification: from texts to steps of the shards, and to vectors and scores."""
