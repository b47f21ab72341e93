"""The requests of a batch, and the file of its answers, which a run continues."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank")
_FIELDS = ("custom_id", "method", "url", "body")
_OK = 200


class FileError(Exception):
    """A file that cannot be used; the text names it, and the line."""


@dataclass(frozen=True, slots=True)
class Line:
    """A request's place in the file: bodies are read when they are sent."""

    custom_id: str
    start: int
    size: int


def read_requests(path: Path) -> list[Line]:
    """Check all lines. Raises FileError for the first that is wrong."""
    lines: list[Line] = []
    numbers: dict[str, int] = {}
    start = 0
    for number, text in enumerate(_lines_of(path), 1):
        if text.strip():
            try:
                custom_id = _checked(text)
            except ValueError as error:
                raise FileError(f"{path}, line {number}: {error}") from None
            if custom_id in numbers:
                raise FileError(f"{path}, line {number}: its custom_id is that of line {numbers[custom_id]} too")
            numbers[custom_id] = number
            lines.append(Line(custom_id, start, len(text)))
        start += len(text)
    if not lines:
        raise FileError(f"{path} has no requests")
    return lines


def _lines_of(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from None


def _checked(text: bytes) -> str:
    """Return a request's id. Raises ValueError."""
    row = _object(text)
    for name in _FIELDS:
        if name not in row:
            raise ValueError(f"it has no `{name}`")
    if others := row.keys() - set(_FIELDS):
        raise ValueError(f"unknown field `{min(others)[:80]}`; there are {', '.join(_FIELDS)}")
    custom_id, body = row["custom_id"], row["body"]
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("`custom_id` must be a text")
    if row["method"] != "POST":
        raise ValueError("`method` must be POST")
    if row["url"] not in URLS:
        raise ValueError(f"`url` must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError("`body` must be an object")
    if body.get("stream"):
        raise ValueError("`stream` must be false: answers are lines of a file")
    return custom_id


def _object(text: bytes) -> dict[str, Any]:
    try:
        row = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row


class Answers:
    """The file of answers, locked, with whole lines of successes only until new ones come."""

    def __init__(self, descriptor: int, done: frozenset[str]) -> None:
        self.done = done
        """Ids that need not be asked for again."""
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: Path, known: Container[str]) -> Self:
        """Open for `known` ids, dropping failures and a torn end. Raises FileError."""
        try:
            descriptor = _locked(path)
            done, size = set(), 0
            for custom_id, text in _kept(path, known):
                done.add(custom_id)
                size += len(text)
            if size != os.fstat(descriptor).st_size:
                descriptor = _rewritten(path, descriptor, (text for _, text in _kept(path, known)))
        except OSError as error:
            raise FileError(f"{path}: {error.strerror}") from None
        return cls(descriptor, frozenset(done))

    def add(self, row: dict[str, Any]) -> None:
        """Append a line. Raises OSError."""
        _write(self._descriptor, orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        self.sync()
        os.close(self._descriptor)


def _locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise FileError(f"{path}: another batch is writing it") from None
    return descriptor


def _kept(path: Path, known: Container[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the answers with status 200, and their lines."""
    for number, text in enumerate(_lines_of(path), 1):
        if not text.endswith(b"\n"):
            return  # the end of a run that was killed
        try:
            row = _object(text)
        except ValueError as error:
            raise FileError(f"{path}, line {number}: {error}") from None
        custom_id, response = row.get("custom_id"), row.get("response")
        if not isinstance(custom_id, str) or custom_id not in known:
            raise FileError(f"{path}, line {number}: no answer to a request of this batch; name another file")
        if isinstance(response, dict) and response.get("status_code") == _OK:
            yield custom_id, text


def _write(descriptor: int, text: bytes) -> None:
    left = memoryview(text)
    while left:
        left = left[os.write(descriptor, left) :]


def _rewritten(path: Path, old: int, lines: Iterable[bytes]) -> int:
    """Replace the file by one with these lines, which is locked before it is found there."""
    new_path = path.with_name(f".{path.name}.{os.getpid()}")
    new_path.unlink(missing_ok=True)
    descriptor = _locked(new_path)
    os.fchmod(descriptor, os.fstat(old).st_mode & 0o777)
    for line in lines:
        _write(descriptor, line)
    os.fsync(descriptor)
    os.replace(new_path, path)
    os.close(old)
    return descriptor
