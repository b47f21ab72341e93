"""Chat templates, rendered in bounded processes."""
