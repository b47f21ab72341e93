"""Routes that describe the server or administer it, and those that are refused by name."""
