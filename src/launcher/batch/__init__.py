"""`launcher batch`: requests of a file, answered to a file."""
