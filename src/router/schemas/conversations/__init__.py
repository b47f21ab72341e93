"""Bodies of other chat APIs."""
