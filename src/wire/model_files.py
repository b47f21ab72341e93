"""What router and shard read alike of a model's small JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
"""Where configs write the longest sequence that their positions allow."""

_MAX_BYTES = 64 * 2**20
# transformers writes "no limit" as int(1e30).
_NO_LIMIT = 10**18


def read_object(path: Path, error: type[Exception]) -> dict[str, Any]:
    """The object in `path`. Raises `error`, one line, if the file is missing, too large, or not a JSON object."""
    found = _read(path, error)
    if found is None:
        raise error(f"cannot read {path}: No such file or directory")
    return found


def read_optional_object(path: Path, error: type[Exception]) -> dict[str, Any]:
    """As `read_object`; an absent file is an empty object."""
    return _read(path, error) or {}


def _read(path: Path, error: type[Exception]) -> dict[str, Any] | None:
    """None: there is no such file. One that may not be looked at is an error, not absent."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise error(f"{path} is larger than {_MAX_BYTES // 2**20} MiB")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror}") from cause
    except (ValueError, RecursionError) as cause:
        raise error(f"{path} is not valid JSON: {' '.join(str(cause).split())}") from cause
    if not isinstance(value, dict):
        raise error(f"{path} does not hold a JSON object")
    return value


def token_text(token: Any) -> str | None:
    """A token as configs write it: its text, or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def length_limit(value: Any) -> int | None:
    """A length in tokens; None where the config names no limit."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 < value < _NO_LIMIT else None
