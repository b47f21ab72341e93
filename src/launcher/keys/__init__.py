"""Keys of a server's clients."""
