"""Other chat APIs: bodies become chats, whose deltas writers turn back."""
