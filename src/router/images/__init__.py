"""Images in requests: found in prompts, fetched, prepared by worker processes, and kept for the next request."""
