"""The HTTP door; the only place that imports FastAPI."""
