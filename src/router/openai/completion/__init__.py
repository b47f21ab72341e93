"""OpenAI's completions API: from its body to generate requests, and from events to its answers."""
