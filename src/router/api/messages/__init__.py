"""Anthropic's Messages API: bodies to chats, answers to blocks and events."""
