"""Images in requests: found, fetched, prepared, kept."""
