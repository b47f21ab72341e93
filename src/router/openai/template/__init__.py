"""Chat templates, rendered in a bounded process of its own."""
