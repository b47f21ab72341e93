"""API keys of a file: what each may do, and what is left of its limits."""
