"""A file with one line of JSON for each request, for bills, statistics and replays.

Only at the level `full` it has texts of clients.

A thread writes, so that no request waits for a disk. What it cannot take is counted and lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import logging.handlers
import os
import queue
import secrets
import threading
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from router.errors import StartupError
from router.metrics import Metrics
from wire.cli.request_log_options import DEFAULT_SIZE, RequestLogLevel, RequestLogOptions

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 64
_OLD_FILES = 4
_MOST_WAITING = 10_000
_MOST_WAITING_BYTES = 256 << 20  # of bodies and answers
_FLUSH_S = 2.0
_HASH_BYTES = 6  # exact as a number of JSON in every language

Record = dict[str, Any]
Prompts = Mapping[tuple[int, ...], int]


class Bodies(Protocol):
    """The body and the answer of a request."""

    @property
    def num_bytes(self) -> int: ...
    def fields(self) -> Record: ...


class RequestLog:
    """Takes records on the event loop's thread."""

    def __init__(
        self, path: Path, metrics: Metrics, *, level: RequestLogLevel = "usage", size: int = DEFAULT_SIZE
    ) -> None:
        """Open the file. Raises StartupError if that fails.

        Args:
            size: Bytes of a file.
        """
        self._metrics = metrics
        self.has_bodies = level == "full"
        if self.has_bodies:
            logger.warning("`--request-log-level full`: %s has the text of all prompts and answers", path)
        # Of this start: hashes of two starts cannot be compared, and no prompt can be guessed by trying.
        self._salt = secrets.token_bytes(16) if level != "usage" else None
        self._waiting: queue.Queue[tuple[Record, Prompts, Bodies | None] | None] = queue.Queue(_MOST_WAITING)
        self._num_counted = 0
        self._taken_bytes = self._written_bytes = 0  # each has one thread that adds to it
        try:
            self._file = _File(path, size)
        except OSError as error:
            raise StartupError(f"`--request-log` {path}: {error.strerror}") from None
        self._thread = threading.Thread(target=self._write_all, name="request-log", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, options: RequestLogOptions, metrics: Metrics, resources: contextlib.ExitStack) -> RequestLog | None:
        """Return the log that the options ask for, closed with `resources`."""
        if options.request_log is None:
            return None
        log = cls(
            options.request_log,
            metrics,
            level=options.request_log_level or "usage",
            size=options.request_log_size or DEFAULT_SIZE,
        )
        resources.callback(log.close)
        return log

    def add(self, record: Record, prompts: Prompts, bodies: Bodies | None = None) -> None:
        """Write a line soon.

        Args:
            prompts: The tokens of the request's prompts, and how many of each the prefix cache had.
        """
        num_bytes = 0 if bodies is None else bodies.num_bytes
        try:
            if num_bytes and self._taken_bytes - self._written_bytes + num_bytes > _MOST_WAITING_BYTES:
                raise queue.Full
            self._waiting.put_nowait((record, prompts, bodies))
            self._taken_bytes += num_bytes
        except queue.Full:
            self._metrics.count("tgi_request_log_dropped")
        if self._file.num_failed != self._num_counted:  # on the other thread, which counts no metrics
            failed = self._file.num_failed
            self._metrics.count("tgi_request_log_dropped", failed - self._num_counted)
            self._num_counted = failed

    def close(self) -> None:
        """Write what waits, for a while."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_FLUSH_S)
        self._thread.join(_FLUSH_S)

    def _write_all(self) -> None:
        while (taken := self._waiting.get()) is not None:
            record, prompts, bodies = taken
            if self._salt is not None:
                record["prompts"] = [
                    {"tokens": len(ids), "cached": cached, "hash_ids": block_hashes(ids, self._salt)}
                    for ids, cached in prompts.items()
                ]
            if bodies is not None:
                record |= bodies.fields()
                self._written_bytes += bodies.num_bytes
            self._file.emit(logging.makeLogRecord({"msg": orjson.dumps(record).decode()}))
        with contextlib.suppress(OSError):  # a line that could not be written is tried again
            self._file.close()


class _File(logging.handlers.RotatingFileHandler):
    """The file and its predecessors, which only this user may read."""

    def __init__(self, path: Path, size: int) -> None:
        self.num_failed = 0
        super().__init__(path, maxBytes=size, backupCount=_OLD_FILES, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.fdopen(os.open(self.baseFilename, flags, 0o600), "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.num_failed:
            logger.exception("The request log cannot be written; its lines are lost as long as that is so")
        self.num_failed += 1


def block_hashes(ids: tuple[int, ...], salt: bytes) -> list[int]:
    """Return a number for each block of a prompt, the last one perhaps not full, that stands for all up to its end."""
    tokens = np.asarray(ids, np.uint32)
    hashes, before = [], b""
    for start in range(0, len(tokens), BLOCK_TOKENS):
        block = tokens[start : start + BLOCK_TOKENS].tobytes()
        before = hashlib.blake2b(before + block, digest_size=_HASH_BYTES, key=salt).digest()
        hashes.append(int.from_bytes(before))
    return hashes
