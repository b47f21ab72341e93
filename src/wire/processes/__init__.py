"""How a process starts another one, and asks what it is doing."""
