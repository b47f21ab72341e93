"""Routes of hosted platforms: SageMaker, Vertex AI, KServe."""
