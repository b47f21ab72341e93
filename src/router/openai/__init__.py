"""OpenAI's chat and completions, to and from our own requests and events. Knows no HTTP."""
