"""The HTTP door: the only place (with `router.app` and `router.cli`) that knows FastAPI and uvicorn."""
