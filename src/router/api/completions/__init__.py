"""OpenAI's completions: bodies to requests, events to answers."""
