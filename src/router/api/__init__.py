"""The HTTP routes: with `router.server` the only package that knows FastAPI."""
