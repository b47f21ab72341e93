"""From the hub into the local cache."""
