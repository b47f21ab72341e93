"""Bars below the log of a terminal, one line for each rank that loads, drawn from the log records themselves.

A record that carries `extra={"progress": "done/total"}` moves the bar of its rank instead of being written; the last
one takes the bar away and is written. Where there is no terminal all of them are plain records, without the field.

A second field, `bar`, is the text after the bar of a download. A writer that chooses how often it makes such records
asks `are_drawn`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import shutil
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from wire.text.escape import one_line

FIELD = "progress"
TEXT = "bar"
WANTED = "TERCET_BARS"
"""Set to 1 by a parent that draws bars from the records of this process."""
WIDTH = 30
_VALUE = re.compile(r"(\d{1,9})/(\d{1,9})")


class Stream(Protocol):
    """Where lines go: any text stream will do."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...
    def isatty(self) -> bool: ...


def are_drawn(environ: Mapping[str, str]) -> bool:
    """Whether records with progress become bars, here or at the parent."""
    streams = [getattr(handler, "stream", None) for handler in logging.getLogger().handlers]
    return environ.get(WANTED) == "1" or any(isinstance(stream, StatusLines) for stream in streams)


def bar(name: str, done: int, total: int) -> str:
    """`name [######........]  42 %`."""
    filled = WIDTH * done // total
    return f"{name} [{'#' * filled}{'.' * (WIDTH - filled)}] {100 * done // total:3d} %"


class StatusLines:
    """A terminal whose last lines can be replaced. Whole log lines are written above them. Safe for threads."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._lines: dict[object, str] = {}
        self._num_drawn = 0
        self._lock = threading.Lock()

    def write(self, text: str, /) -> object:
        """Text that ends with a newline goes above the status lines; other text erases them until it does."""
        with self._lock:
            self._stream.write(self._erased() + text + (self._drawn() if text.endswith("\n") else ""))
        return len(text)

    def flush(self) -> object:
        return self._stream.flush()

    def isatty(self) -> bool:
        return True

    def show(self, key: object, text: str) -> None:
        """Set the line of `key`."""
        with self._lock:
            self._lines[key] = text
            self._redraw()

    def remove(self, key: object) -> None:
        with self._lock:
            if self._lines.pop(key, None) is not None:
                self._redraw()

    def clear(self) -> None:
        with self._lock:
            self._lines.clear()
            self._redraw()

    def _redraw(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # as records: a stream that breaks loses them, it never raises
            self._stream.write(self._erased() + self._drawn())
            self._stream.flush()

    def _erased(self) -> str:
        """Up to where the lines begin, and nothing below."""
        num_drawn, self._num_drawn = self._num_drawn, 0
        return f"\x1b[{num_drawn}F\x1b[J" if num_drawn else ""

    def _drawn(self) -> str:
        # A line that wrapped would be two to erase; a terminal that says nothing of its width has 80.
        width = max(shutil.get_terminal_size().columns - 1, 1)
        self._num_drawn = len(self._lines)
        return "".join(f"{one_line(self._lines[key])[:width]}\n" for key in sorted(self._lines, key=str))


class ProgressFilter(logging.Filter):
    """For the one handler of a process. `lines`: where bars are drawn, None: nowhere.

    `downloads_only`: who draws the loading ranks otherwise gets no bars of them.
    """

    def __init__(self, lines: StatusLines | None, rank: int | None = None, *, downloads_only: bool = False) -> None:
        super().__init__()
        self._lines, self._rank, self._downloads_only = lines, rank, downloads_only

    def filter(self, record: logging.LogRecord) -> bool:
        fields = self._taken(record)
        found = _VALUE.fullmatch(str(fields.get(FIELD)))
        if found is None or int(found[2]) == 0 or self._lines is None:
            # An error ends the load of any process: nothing should be left below it.
            if self._lines is not None and record.levelno >= logging.ERROR:
                self._lines.clear()
            return True
        if self._downloads_only and not isinstance(fields.get(TEXT), str):
            return True
        self._draw(fields, self._lines, done=int(found[1]), total=int(found[2]))
        return int(found[1]) >= int(found[2])

    def _draw(self, fields: Mapping[str, Any], lines: StatusLines, *, done: int, total: int) -> None:
        rank, text = fields["rank"], fields.get(TEXT)
        if done >= total:
            lines.remove(rank)
        elif isinstance(text, str):
            lines.show(rank, f"{bar('Downloading', done, total)}  {text[:100]}")
        else:
            name = "Loading weights" if rank is None else f"Loading weights, rank {rank}"
            lines.show(rank, bar(name, done, total))

    def _taken(self, record: logging.LogRecord) -> dict[str, Any]:
        """The fields above of a record, which loses them, and its rank."""
        line = getattr(record, "log_line", None)
        if line is None:
            taken = {name: record.__dict__.pop(name, None) for name in (FIELD, TEXT)}
            return taken | {"rank": self._rank}
        taken = {name: line.fields.get(name) for name in (FIELD, TEXT)}
        if taken[FIELD] is not None:
            rest = {key: field for key, field in line.fields.items() if key not in taken}
            record.log_line = dataclasses.replace(line, fields=rest)
        return taken | {"rank": line.rank}
