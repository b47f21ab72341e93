"""HTTP of servers whose task is embed, rerank or classify: TEI's routes, OpenAI's, Cohere's and Jina's, vLLM's."""
