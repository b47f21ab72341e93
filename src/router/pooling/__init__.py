"""Embeddings, reranking, classification: texts to steps, and back."""
