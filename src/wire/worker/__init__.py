"""A bounded process of its own for work that a client's input could make endless, and what starts and asks it."""
