"""OpenAI's Responses API: bodies to chats, answers to items and events."""
