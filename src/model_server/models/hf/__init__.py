"""Models that transformers runs: its modelling over our paged cache, or with one cache object per request."""
