"""How models write calls and reasoning, and their one reader. Pure."""
