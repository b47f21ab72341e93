"""Read a JSON object that someone else wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model_server.errors import StartupError

MAX_BYTES = 64 * 2**20


def read_object(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises StartupError, one line, if it is missing, too large, or not a JSON object."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise StartupError(f"{path} is larger than {MAX_BYTES // 2**20} MiB")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} does not hold a JSON object")
    return value
