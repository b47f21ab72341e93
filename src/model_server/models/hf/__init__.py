"""Models that transformers runs: over our paged cache, or with a cache per request."""
