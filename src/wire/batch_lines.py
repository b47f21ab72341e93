"""The files of a batch in OpenAI's form: lines of requests, and of answers, which a later run continues.

`launcher batch` and the router's `/v1/batches` share them.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank")
_FIELDS = ("custom_id", "method", "url", "body")
_OK = 200
MOST_FAULTS = 100
"""That are said of a file."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a file, or with a line of it."""

    text: str
    line: int | None = None
    code: str = "invalid_request"  # as OpenAI's batches say it
    param: str | None = None


class FileError(Exception):
    """A file that cannot be used; a line of the text for each fault, which names the file and its line."""

    def __init__(self, path: Path, *faults: Fault) -> None:
        places = (str(path) if fault.line is None else f"{path}, line {fault.line}" for fault in faults)
        super().__init__("\n".join(f"{place}: {fault.text}" for place, fault in zip(places, faults, strict=True)))
        self.faults = faults


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
        FileError: For the first hundred faults, if there are any.
    """
    lines: list[Line] = []
    faults: list[Fault] = []
    numbers: dict[str, int] = {}
    start = 0
    for number, text in enumerate(_lines_of(path), 1):
        if text.strip():
            if len(lines) == most:
                faults.append(Fault(f"a batch has at most {most} requests", number, "too_many_tasks"))
                break
            custom_id, found = _checked(text, number, url, numbers)
            faults += found
            if len(faults) >= MOST_FAULTS:
                break
            if custom_id:
                numbers.setdefault(custom_id, number)
            lines.append(Line(custom_id, start, len(text)))
        start += len(text)
    if not lines and not faults:
        faults.append(Fault("the file has no requests", code="empty_batch"))
    if faults:
        raise FileError(path, *faults[:MOST_FAULTS])
    return lines


def _lines_of(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise FileError(path, Fault(str(error.strerror))) from None


def _checked(text: bytes, number: int, url: str | None, numbers: Mapping[str, int]) -> tuple[str, list[Fault]]:
    """Return a request's id, which is empty where it has none, and what is wrong with its line.

    Args:
        numbers: Lines of the ids before it.
    """
    try:
        row = _object(text)
    except ValueError as error:
        return "", [Fault(str(error), number, "invalid_json_line")]
    custom_id = row.get("custom_id", "")
    is_id = isinstance(custom_id, str) and custom_id != ""
    faults = [Fault(f"it has no `{name}`", number, param=name) for name in _FIELDS if name not in row]
    if others := row.keys() - set(_FIELDS):
        name = min(others)[:80]
        faults.append(Fault(f"unknown field `{name}`; there are {', '.join(_FIELDS)}", number, param=name))
    if "custom_id" in row and not is_id:
        faults.append(Fault("`custom_id` must be a text", number, param="custom_id"))
    elif is_id and custom_id in numbers:
        said = f"its custom_id is that of line {numbers[custom_id]} too"
        faults.append(Fault(said, number, "duplicate_custom_id", "custom_id"))
    if row.get("method", "POST") != "POST":
        faults.append(Fault("`method` must be POST", number, param="method"))
    if "url" in row and row["url"] not in URLS:
        faults.append(Fault(f"`url` must be one of {', '.join(URLS)}", number, "url_mismatch", "url"))
    elif "url" in row and url not in (None, row["url"]):
        faults.append(Fault(f"`url` must be the batch's `endpoint`, {url}", number, "url_mismatch", "url"))
    body = row.get("body", {})
    if not isinstance(body, dict):
        faults.append(Fault("`body` must be an object", number, param="body"))
    elif body.get("stream"):
        faults.append(Fault("`stream` must be false: answers are lines of a file", number, param="body.stream"))
    return custom_id if is_id else "", faults


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
            raise FileError(path, Fault(str(error.strerror))) from None
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
        """Raises OSError, but is closed all the same."""
        try:
            self.sync()
        finally:
            os.close(self._descriptor)


def _locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise FileError(path, Fault("another batch is writing it")) from None
    return descriptor


def _kept(path: Path, known: Container[str], keeps_failures: bool) -> Iterator[tuple[str, bytes]]:
    """Yield ids that are answered, and their lines."""
    for number, text in enumerate(_lines_of(path), 1):
        if not text.endswith(b"\n"):
            return  # the end of a run that was killed
        try:
            row = _object(text)
        except ValueError as error:
            raise FileError(path, Fault(str(error), number)) from None
        custom_id, response = row.get("custom_id"), row.get("response")
        if not isinstance(custom_id, str) or custom_id not in known:
            raise FileError(path, Fault("no answer to a request of this batch; name another file", number))
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
