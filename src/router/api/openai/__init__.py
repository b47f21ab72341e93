"""What OpenAI's chats and completions share: first fields, usage, log probabilities, parameters."""
