"""HTTP of embed, rerank and classify: TEI, OpenAI, Cohere, Jina, vLLM."""
