"""A file of API keys: who may send requests, what for, and how many."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any, Literal, get_args

from wire.model_files import read_yaml

Scope = Literal["inference", "metrics", "admin"]
SchedulingPolicy = Literal["fcfs", "priority"]
SCHEDULING_POLICY = (
    "Whose turn it is while requests wait: with priority the lowest `priority` is next; with fcfs the oldest, and "
    "priorities are refused. Default: priority with --keys-file, else fcfs."
)

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")
_INT64 = 2**63


@dataclass(frozen=True, kw_only=True)
class Key:
    """One row of the file; a limit of None is no limit."""

    # The label in metrics and in the log.
    name: str
    # SHA-256 of the key, which has 256 random bits: a slow hash would protect nothing.
    digest: bytes
    scopes: frozenset[Scope] = frozenset({"inference"})
    models: frozenset[str] | None = None
    # Its share, relative to those of other keys.
    weight: float = 1.0
    # The most urgent one that its requests may ask for.
    priority: int = 0
    # Requests that are answered at the same time.
    concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    # Prompt and answer of one request.
    max_total_tokens: int | None = None
    expires: datetime | None = None
    has_own_cache: bool = False

    @property
    def is_limited(self) -> bool:
        """Whether its answers have headers that say what is left."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def new_key() -> tuple[str, str]:
    """Return a random key, and its `hash` for the file."""
    key = f"tk-{secrets.token_urlsafe(32)}"
    return key, f"sha256:{digest_of(key.encode()).hex()}"


def check_name(name: str) -> str:
    """Return a key's name. Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError("must be 1 to 64 of A-Z, a-z, 0-9, `_`, `.` and `-`")
    return name


def check_keys(path: Path | None, api_key: str | None, error: type[Exception]) -> None:
    """Refuse a file beside a key, and one that is wrong."""
    if path is None:
        return
    if api_key is not None:
        raise error("`--api-key` and `--keys-file` exclude each other: make the key a row of the file")
    try:
        read_keys(path)
    except ValueError as cause:
        raise error(f"`--keys-file`: {cause}") from None


def read_keys(path: Path) -> tuple[Key, ...]:
    """Return the keys of a file.

    Raises:
        ValueError: One line that names the file and the row, without any hash.
    """
    # Imported here: only a start with such a file is worth the time.
    import yaml

    # The C loader reads ten thousand keys in a second, the other one in ten.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    rows = read_yaml(path, lambda text: yaml.load(text, Loader=loader))
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path} holds no keys: it is a list of rows, which `launcher keys new NAME` prints")
    keys: list[Key] = []
    names: dict[str, int] = {}
    digests: dict[bytes, int] = {}
    for number, row in enumerate(rows, 1):
        try:
            key = _key(row)
        except ValueError as error:
            raise ValueError(f"{path}, key {number}: {error}") from None
        if key.name in names:
            raise ValueError(f"{path}, key {number}: the name {key.name} is that of key {names[key.name]} too")
        if key.digest in digests:
            raise ValueError(f"{path}, key {number}: its hash is that of key {digests[key.digest]} too")
        names[key.name] = digests[key.digest] = number
        keys.append(key)
    return tuple(keys)


def _key(row: object) -> Key:
    if not isinstance(row, dict):
        raise ValueError("a row has fields, such as `name: alice`")
    for name in row:
        if name not in _FIELDS:
            raise ValueError(f"unknown field `{str(name)[:80]}`; there are {', '.join(_FIELDS)}")
    for name in ("name", "hash"):
        if row.get(name) is None:
            raise ValueError(f"it has no `{name}`")
    fields: dict[str, Any] = {}
    for name, value in row.items():
        if value is None:
            continue
        field, read = _FIELDS[name]
        try:
            fields[field] = read(value)
        except ValueError as error:
            raise ValueError(f"`{name}` {error}") from None
    return Key(**fields)


def _name(value: object) -> str:
    return check_name(value if isinstance(value, str) else "")


def _hash(value: object) -> bytes:
    found = _HASH.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError("must be sha256: and 64 hexadecimal digits, as `launcher keys new NAME` prints it")
    return bytes.fromhex(found[1])


def _scopes(value: object) -> frozenset[str]:
    scopes = _texts(value)
    if not scopes or not scopes <= set(get_args(Scope)):
        raise ValueError(f"must be a list of {', '.join(get_args(Scope))}")
    return scopes


def _texts(value: object) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError("must be a list of names")
    return frozenset(value)


def _weight(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.001 <= value <= 1000:
        raise ValueError("must be a number from 0.001 to 1000")
    return float(value)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _INT64:
        raise ValueError("must be a whole number above 0; leave it out for no limit")
    return value


def _priority(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -_INT64 <= value < _INT64:
        raise ValueError("must be a whole number; lower ones are served earlier")
    return value


def _expires(value: object) -> datetime:
    """Read a date, at whose beginning the key ends, or a time; UTC unless it says another zone."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            value = None
    if isinstance(value, datetime):
        return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    if isinstance(value, date):
        return datetime.combine(value, time(), UTC)
    raise ValueError("must be a date such as 2027-01-31, or a time such as 2027-01-31T12:00:00Z")


def _cache(value: object) -> bool:
    if value not in ("shared", "own"):
        raise ValueError("must be shared or own")
    return value == "own"


_FIELDS: Mapping[str, tuple[str, Callable[[object], object]]] = {
    "name": ("name", _name),
    "hash": ("digest", _hash),
    "scopes": ("scopes", _scopes),
    "models": ("models", _texts),
    "weight": ("weight", _weight),
    "priority": ("priority", _priority),
    "concurrent": ("concurrent", _count),
    "requests_per_minute": ("requests_per_minute", _count),
    "tokens_per_minute": ("tokens_per_minute", _count),
    "max_total_tokens": ("max_total_tokens", _count),
    "expires": ("expires", _expires),
    "cache": ("has_own_cache", _cache),
}
"""The file's fields: ours, and what reads its value."""
