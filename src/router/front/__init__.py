"""The front of several models: one address, from which requests go to the router of their model."""
