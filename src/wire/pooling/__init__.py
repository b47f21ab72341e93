"""Embeddings, reranking and classification: what a model's files say of them, and the messages of their steps."""
