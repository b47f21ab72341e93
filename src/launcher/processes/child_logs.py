"""Writes children's output to our log; a thread for each stream reads always, so that no child blocks."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from wire import phases
from wire.log.log_line import LogLine, parse
from wire.log.progress_bars import FIELD as PROGRESS
from wire.text.escape import escape

logger = logging.getLogger("text_generation_launcher")

_ASSEMBLED_BYTES = 1024 * 1024
"""A record may be this long to be understood; what is written of it is cut to a line's 64 KiB."""
_RAW_BYTES = 64 * 1024
_KEPT_LINES = 2000
_KEPT_BYTES = 1024 * 1024
_READ_BYTES = 64 * 1024


class LineSplitter:
    """Splits bytes into lines in bounded memory, and cuts lines over `limit` bytes."""

    def __init__(self, limit: int = _ASSEMBLED_BYTES) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._lost = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        *whole, rest = data.split(b"\n")
        for piece in whole:
            self._add(piece)
            yield self._pop()
        self._add(rest)

    def finish(self) -> Iterator[bytes]:
        """The last line, if the stream did not end with a newline."""
        if self._size:
            yield self._pop()

    def _add(self, piece: bytes) -> None:
        kept = piece[: self._limit - self._size]
        self._lost += len(piece) - len(kept)
        self._size += len(kept)
        if kept:
            self._parts.append(kept)

    def _pop(self) -> bytes:
        line = b"".join(self._parts)
        if self._lost:
            line += b" ... (%d bytes more)" % self._lost
        self._parts, self._size, self._lost = [], 0, 0
        return line.rstrip(b"\r")


class KeptLines:
    """The last lines of a stream, bounded in number and bytes."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._size = 0
        self._dropped = 0
        self._lock = threading.Lock()  # read by one thread while another one adds

    def add(self, line: str) -> None:
        with self._lock:
            self._lines.append(line)
            self._size += len(line)
            while len(self._lines) > _KEPT_LINES or (self._size > _KEPT_BYTES and len(self._lines) > 1):
                self._size -= len(self._lines.popleft())
                self._dropped += 1

    @property
    def num_added(self) -> int:
        """How many lines there have ever been."""
        with self._lock:
            return self._dropped + len(self._lines)

    def since(self, num_added: int) -> list[str]:
        """The lines that came after that number of them, as far as they are kept."""
        with self._lock:
            return list(islice(self._lines, max(0, num_added - self._dropped), None))

    @property
    def last(self) -> str:
        """The last line that is not empty: of a traceback, the one that says what it was."""
        return next((line for line in reversed(self.since(0)) if line.strip()), "")

    def chunks(self) -> Iterator[str]:
        """All of it, in texts that fit a record."""
        earlier = [f"... {self._dropped} earlier lines"] if self._dropped else []
        return texts_of(earlier + self.since(0))


def texts_of(lines: Iterable[str], size: int = 32 * 1024) -> Iterator[str]:
    """The lines in texts of about `size` characters."""
    text: list[str] = []
    length = 0
    for line in lines:
        if text and length + len(line) > size:
            yield "\n".join(text)
            text, length = [], 0
        text.append(line)
        length += len(line) + 1
    if text:
        yield "\n".join(text)


class Progress:
    """What a child says it is doing at its start (`wire.phases`), and since when."""

    def __init__(self) -> None:
        self.began: list[tuple[str, float]] = [(phases.STARTING, time.monotonic())]
        """Each phase and when it began, oldest first."""
        self._done = ""

    def see(self, line: LogLine) -> bool:
        """Take note of a record; whether it only reports a phase."""
        phase, done = line.fields.get(phases.FIELD), line.fields.get(PROGRESS)
        if line.target == phases.LOGGER and isinstance(phase, str):
            self.began.append((phase, time.monotonic()))
            self._done = ""
            return True
        if isinstance(done, str):
            self._done = f" {done} layers"
        return False

    @property
    def phase(self) -> str:
        """The present one, and how far it is where that is known."""
        return self.began[-1][0] + self._done

    def __str__(self) -> str:
        return f"{self.phase} for {time.monotonic() - self.began[-1][1]:.0f} s"

    def durations(self, until: float) -> list[tuple[str, float]]:
        """Each phase that began before `until` and what it took of the time before it."""
        began = list(self.began)  # another thread adds to it
        ends = [at for _, at in began[1:]] + [until]
        return [(name, min(end, until) - at) for (name, at), end in zip(began, ends, strict=True) if at < until]


class ChildLogs:
    """The two streams of one child. Reading starts at once; `finish` waits for their ends."""

    def __init__(self, name: str, rank: int | None, stdout: int, stderr: int, *, model: str = "") -> None:
        """Takes the two descriptors over.

        Args:
            model: A field of its records, where there are several models.
        """
        self._name, self._rank, self._model = name, rank, model
        self._logger = logging.getLogger(f"text_generation_launcher.{name}")
        self.errors = KeptLines()
        self.progress = Progress()
        self.last_message = ""
        self.last_error = ""
        """The last record at ERROR: mostly the reason of what comes next."""
        self._threads = [
            threading.Thread(target=_read, args=(stdout, self._on_output), name=f"{name}-out", daemon=True),
            threading.Thread(target=_read, args=(stderr, self._on_error), name=f"{name}-err", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, timeout_s: float) -> None:
        """Wait until both streams end; limited, since a grandchild may hold them open."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _on_output(self, raw: bytes) -> None:
        line = parse(raw)
        if line is None:
            if raw.strip():
                self._emit(self._raw(raw, "INFO"))
            return
        if self.progress.see(line):
            line = dataclasses.replace(line, fields={})
        else:
            self.last_message = line.message
        if line.level == "ERROR":
            self.last_error = line.message
        self._emit(line)

    def _on_error(self, raw: bytes) -> None:
        line = self._raw(raw, "DEBUG")
        self.errors.add(line.message)
        self._emit(line)

    def _raw(self, raw: bytes, level: str) -> LogLine:
        text = escape(raw[:_RAW_BYTES].decode("utf-8", "replace"))
        return LogLine(level=level, message=text, target=self._name)

    def _emit(self, line: LogLine) -> None:
        # Records of the router keep TGI's flat layout, those of shards become the launcher's own, with the rank.
        if self._rank is not None and line.rank is None:
            line = dataclasses.replace(line, rank=self._rank)
        if self._model:
            line = dataclasses.replace(line, fields={**line.fields, "model": self._model})
        extra = {"log_line": line, "log_layout": "flat" if self._name == "router" else None}
        self._logger.log(line.python_level, "%s", line.message, extra=extra)


def _read(descriptor: int, on_line: Callable[[bytes], None]) -> None:
    splitter = LineSplitter()
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        while data := stream.read(_READ_BYTES):
            for line in splitter.feed(data):
                _guarded(on_line, line)
        for line in splitter.finish():
            _guarded(on_line, line)


def _guarded(on_line: Callable[[bytes], None], line: bytes) -> None:
    try:
        on_line(line)
    except Exception:  # Whatever a child prints: were this thread to end, the child would block on a full pipe.
        logger.exception("Could not handle a line of output")
