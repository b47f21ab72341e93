"""Routes of SageMaker, Vertex AI and KServe."""
