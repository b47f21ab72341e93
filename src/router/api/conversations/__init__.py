"""Routes of other chat APIs. Each body becomes a chat, whose deltas a writer turns into that API's answer."""
