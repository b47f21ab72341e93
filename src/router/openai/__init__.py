"""OpenAI's chat and completions to and from our requests and events."""
