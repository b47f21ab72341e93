"""OpenAI's chat API on top of generation. Pure."""
