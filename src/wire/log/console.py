"""The log at a terminal: warnings, errors and finished requests in a short line each.

`extra={"on_console": True}` shows a record whatever its level, False never.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from wire.log.log_line import LogLine
from wire.log.progress_bars import StatusLines
from wire.text.escape import shown

ATTRIBUTE = "on_console"
REQUESTS = "router.requests"
"""The router's logger of finished requests. Its level DEBUG switches them on; the records themselves are INFO."""
_REFUSALS = "router.api.errors"
"""Where it says why a request is refused, which the request's own line says, too."""
_NOTES = "router.schemas.unknown"
"""Where the router says, once for each name, which parameters it ignores."""

_MOST_BYTES = 16 * 1024
_MOST_REMEMBERED = 256
_WORDS = {"WARN": ("warning", "33"), "ERROR": ("error", "31")}


class ConsoleFilter(logging.Filter):
    """Chooses records; a starting child's first error becomes the launch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.is_starting = True
        self._shown: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        asked = getattr(record, ATTRIBUTE, None)
        if asked is not None:
            return bool(asked)
        line = getattr(record, "log_line", None)
        if not isinstance(line, LogLine):
            return record.levelno >= logging.WARNING
        if line.target in (REQUESTS, _NOTES):
            return True
        if record.levelno < logging.WARNING or (self.is_starting and record.levelno >= logging.ERROR):
            return False
        if line.target == _REFUSALS and not line.exception:  # with one, the server has failed
            return False
        return line.rank is None or self._is_new(line.message)

    def _is_new(self, message: str) -> bool:
        """Ranks mostly say the same: once is enough."""
        if message in self._shown:
            return False
        if len(self._shown) >= _MOST_REMEMBERED:
            self._shown.clear()
        self._shown.add(message)
        return True


@dataclass(frozen=True)
class Console:
    """The terminal of a process whose log is short."""

    lines: StatusLines
    filter: ConsoleFilter

    def say(self, text: str) -> None:
        self.lines.write(shown(text) + "\n")


def to_console(line: LogLine, *, colour: bool) -> str:
    if line.target == REQUESTS:
        return f"{_time_of_day(line.timestamp)}  {shown(line.message)}"
    word, code = ("note", "36") if line.target == _NOTES else _WORDS.get(line.level, ("", ""))
    rank = "" if line.rank is None else f"rank {line.rank}: "
    body = line.message + (f"\n{line.exception}" if line.exception else "")
    # Indented, so that no second line can pass for another record.
    text = rank + shown(body, _MOST_BYTES).replace("\n", "\n  ")
    if not word:
        return text
    return f"\x1b[{code}m{word}:\x1b[0m {text}" if colour else f"{word}: {text}"


def _time_of_day(timestamp: Any) -> str:
    """In this machine's time zone."""
    try:
        return f"{datetime.fromisoformat(timestamp).astimezone():%H:%M:%S}"
    except ValueError:
        return "--:--:--"
