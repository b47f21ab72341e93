"""OpenAI's completions dialect: from its body to generate requests, and from events to its answers."""
