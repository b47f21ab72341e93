"""Bars below the log of a terminal, one line for each rank that loads, drawn from the log records themselves.

A record that carries `extra={"progress": "done/total"}` moves the bar of its rank instead of being written; the last
one takes the bar away and is written. Where there is no terminal all of them are plain records, without the field.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import shutil
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wire.log_line import Stream

FIELD = "progress"
WIDTH = 30
_VALUE = re.compile(r"(\d{1,9})/(\d{1,9})")


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
        return "".join(f"{self._lines[key][:width]}\n" for key in sorted(self._lines, key=str))


class ProgressFilter(logging.Filter):
    """For the one handler of a process. `lines`: where bars are drawn, None: nowhere."""

    def __init__(self, lines: StatusLines | None, rank: int | None = None) -> None:
        super().__init__()
        self._lines, self._rank = lines, rank

    def filter(self, record: logging.LogRecord) -> bool:
        found = self._taken(record)
        if found is None or self._lines is None:
            # An error ends a load, whoever's: nothing should be left below it.
            if self._lines is not None and record.levelno >= logging.ERROR:
                self._lines.clear()
            return True
        rank, done, total = found
        if done >= total:
            self._lines.remove(rank)
            return True
        name = "Loading weights" if rank is None else f"Loading weights, rank {rank}"
        self._lines.show(rank, bar(name, done, total))
        return False

    def _taken(self, record: logging.LogRecord) -> tuple[int | None, int, int] | None:
        """Rank, done and total of a record with progress, which loses the field."""
        line = getattr(record, "log_line", None)
        if line is None:
            value, rank = record.__dict__.pop(FIELD, None), self._rank
        else:
            value, rank = line.fields.get(FIELD), line.rank
            rest = {key: field for key, field in line.fields.items() if key != FIELD}
            if value is not None:
                record.log_line = dataclasses.replace(line, fields=rest)
        match = _VALUE.fullmatch(value) if isinstance(value, str) else None
        if match is None or int(match[2]) == 0:
            return None
        return rank, int(match[1]), int(match[2])
