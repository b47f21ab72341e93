"""The files of a batch in OpenAI's form: lines of requests, and of answers, which a later run continues.

`launcher batch` and the router's `/v1/batches` share them.
"""

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

    def __init__(self, path: Path, fault: str, *, line: int | None = None) -> None:
        place = "" if line is None else f", line {line}"
        super().__init__(f"{path}{place}: {fault}")
        self.fault = fault
        """What is wrong, without the place."""
        self.line = line


@dataclass(frozen=True, slots=True)
class Line:
    """A request's place in the file: bodies are read when they are sent."""

    custom_id: str
    start: int
    size: int


def read_requests(path: Path, *, url: str | None = None, most: int | None = None) -> list[Line]:
    """Check all lines.

    Args:
        url: The only one that they may have.
        most: How many there may be.

    Raises:
        FileError: For the first that is wrong.
    """
    lines: list[Line] = []
    numbers: dict[str, int] = {}
    start = 0
    for number, text in enumerate(_lines_of(path), 1):
        if text.strip():
            try:
                custom_id = _checked(text, url)
                if custom_id in numbers:
                    raise ValueError(f"its custom_id is that of line {numbers[custom_id]} too")
                if len(lines) == most:
                    raise ValueError(f"a batch has at most {most} requests")
            except ValueError as error:
                raise FileError(path, str(error), line=number) from None
            numbers[custom_id] = number
            lines.append(Line(custom_id, start, len(text)))
        start += len(text)
    if not lines:
        raise FileError(path, "the file has no requests")
    return lines


def _lines_of(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise FileError(path, str(error.strerror)) from None


def _checked(text: bytes, url: str | None) -> str:
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
    if url not in (None, row["url"]):
        raise ValueError(f"`url` must be the batch's `endpoint`, {url}")
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
    """The file of answers, locked, with whole lines only until new ones come."""

    def __init__(self, descriptor: int, done: frozenset[str]) -> None:
        self.done = done
        """Ids that need not be asked for again."""
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: Path, known: Container[str], *, keeps_failures: bool = False) -> Self:
        """Open for `known` ids, dropping a torn end, and failures, which are asked for again.

        Args:
            keeps_failures: They are not: these are the last word on their requests.

        Raises:
            FileError: It cannot be written, or holds something else.
        """
        try:
            descriptor = _locked(path)
            done, size = set(), 0
            for custom_id, text in _kept(path, known, keeps_failures):
                done.add(custom_id)
                size += len(text)
            if size != os.fstat(descriptor).st_size:
                kept = (text for _, text in _kept(path, known, keeps_failures))
                descriptor = _rewritten(path, descriptor, kept)
        except OSError as error:
            raise FileError(path, str(error.strerror)) from None
        return cls(descriptor, frozenset(done))

    def add(self, row: dict[str, Any]) -> None:
        """Append a line, or nothing. Raises OSError."""
        size = os.fstat(self._descriptor).st_size
        try:
            _write(self._descriptor, orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        except OSError:
            os.ftruncate(self._descriptor, size)  # a full disk takes the beginning of a line
            raise

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
        raise FileError(path, "another batch is writing it") from None
    return descriptor


def _kept(path: Path, known: Container[str], keeps_failures: bool) -> Iterator[tuple[str, bytes]]:
    """Yield ids that are answered, and their lines."""
    for number, text in enumerate(_lines_of(path), 1):
        if not text.endswith(b"\n"):
            return  # the end of a run that was killed
        try:
            row = _object(text)
        except ValueError as error:
            raise FileError(path, str(error), line=number) from None
        custom_id, response = row.get("custom_id"), row.get("response")
        if not isinstance(custom_id, str) or custom_id not in known:
            raise FileError(path, "no answer to a request of this batch; name another file", line=number)
        if keeps_failures or (isinstance(response, dict) and response.get("status_code") == _OK):
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
