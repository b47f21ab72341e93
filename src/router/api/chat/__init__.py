"""OpenAI's chats: body, prompt, tools, answer and stream; the other chat APIs are made of it."""
