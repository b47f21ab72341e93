"""`launcher doctor`: whether this machine can serve, and what to do where it cannot."""
