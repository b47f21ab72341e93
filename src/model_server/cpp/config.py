"""What the environment says of the C++ operators; no other file of this package reads it."""

from __future__ import annotations

import os
from pathlib import Path

# Set to 0 to serve with torch's operators alone.
SWITCH = "TERCET_NATIVE"


def are_switched_off() -> bool:
    return os.environ.get(SWITCH) == "0"


def user_cache() -> Path:
    """The folder for compiled libraries. Raises RuntimeError for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tercet" / "cpp"
