"""From a request to a running generation."""
