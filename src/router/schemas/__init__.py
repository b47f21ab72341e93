"""Bodies of the HTTP routes as pydantic models, without behaviour."""
