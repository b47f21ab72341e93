"""The HTTP door: the only place (with `router.server.app` and `router.cli`) that knows FastAPI and uvicorn."""
