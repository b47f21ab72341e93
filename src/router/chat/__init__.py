"""OpenAI's chat dialect to a generate request and back; pure functions."""
