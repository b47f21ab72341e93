"""One process and another: how a child is started, and asked what it does."""
