"""How a process writes its log: one handler, the levels that were asked for, records as log lines."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from wire import phases
from wire.log.console import ATTRIBUTE, Console, ConsoleFilter, to_console
from wire.log.levels import PACKAGES, level_name, levels_of_loggers
from wire.log.log_line import Layout, LogLine, to_json, to_text
from wire.log.progress_bars import ProgressFilter, StatusLines, Stream
from wire.text.counting import counted

Write = Callable[[LogLine], str]

_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", ATTRIBUTE}


def configure(
    json_output: bool,
    level: str = "INFO",
    *,
    rank: int | None = None,
    layout: Layout | None = None,
    stream: Stream | None = None,
    short: bool = False,
) -> Console | None:
    """Send this process' `logging` to `stream`, replacing earlier set-up.

    On a terminal progress becomes bars. A breaking stream loses records. `extra` becomes fields; `extra={"log_line":
    LogLine, "log_layout": Layout | None}` is a child's, written as it is.

    Args:
        level: A name, or a filter such as `info,router=debug`.
        rank: On every record.
        layout: Default: `shard` with a rank, else `flat`.
        short: A terminal gets `wire.log.console`'s lines, and the caller that console.
    """
    target: Stream = sys.stdout if stream is None else stream
    can_draw = not json_output and _is_terminal(target) and os.environ.get("TERM") != "dumb"
    bars = StatusLines(target) if can_draw else None
    number, named, num_unknown = levels_of_loggers(level)
    handler = _Handler(bars or target)
    console = Console(bars, ConsoleFilter()) if short and bars is not None else None
    if not json_output:
        handler.addFilter(ProgressFilter(bars, rank, downloads_only=console is not None))
    if console is not None:
        handler.addFilter(console.filter)
    chosen: Layout = layout or ("flat" if rank is None else "shard")
    colour = not json_output and _is_terminal(target) and _wants_colour(os.environ)
    write = functools.partial(to_text if console is None else to_console, colour=colour)
    handler.setFormatter(_Formatter(json_output=json_output, layout=chosen, rank=rank, write=write))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(number, logging.WARNING))
    for name in PACKAGES:
        logging.getLogger(name).setLevel(number)
    for name, named_level in named.items():
        logging.getLogger(name).setLevel(named_level)
    if json_output and os.environ.get(phases.VARIABLE) == "1":
        logging.getLogger(phases.LOGGER).setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    if num_unknown:
        logging.getLogger(__name__).warning(
            "LOG_LEVEL: ignoring %s of the filter, which cannot be parsed", counted(num_unknown, "part")
        )
    return console


def name_node(rank: int) -> None:
    """Add a group's node to every record, of children too."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, _Formatter):
            handler.formatter.node = rank


def _wants_colour(environ: Mapping[str, str]) -> bool:
    return environ.get("LOG_COLORIZE", "1").strip().lower() not in ("0", "false", "no", "off")


def _is_terminal(stream: Stream) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


class _Handler(logging.StreamHandler[Any]):
    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError | ValueError):
            super().handleError(record)


class _Formatter(logging.Formatter):
    def __init__(self, *, json_output: bool, layout: Layout, rank: int | None, write: Write) -> None:
        super().__init__()
        self._json_output, self._layout, self._rank, self._write = json_output, layout, rank, write
        self.node: int | None = None

    def format(self, record: logging.LogRecord) -> str:
        line = getattr(record, "log_line", None)
        if not isinstance(line, LogLine):
            line = self._line_of(record)
        elif not line.timestamp:
            line = dataclasses.replace(line, timestamp=_rfc3339(record.created))
        if self.node is not None and "node" not in line.fields:
            line = dataclasses.replace(line, fields={**line.fields, "node": self.node})
        layout: Layout = getattr(record, "log_layout", None) or self._layout
        return to_json(line, layout) if self._json_output else self._write(line)

    def _line_of(self, record: logging.LogRecord) -> LogLine:
        names_place = self._layout != "launcher"
        fields = {key: value for key, value in vars(record).items() if key not in _OWN_ATTRIBUTES}
        return LogLine(
            level="ERROR" if record.levelno > logging.ERROR else level_name(record.levelno),
            message=_message_of(record),
            timestamp=_rfc3339(record.created),
            target=record.name,
            filename=record.filename if names_place else "",
            line_number=record.lineno if names_place else None,
            rank=fields.pop("rank", self._rank),
            exception=self.formatException(record.exc_info) if record.exc_info else "",
            fields=fields,
        )


def _message_of(record: logging.LogRecord) -> str:
    """Return the message, of several lines only if its own format is."""
    try:
        message = record.getMessage()
    except (TypeError, ValueError):  # A wrong format argument must not cost the record.
        message = f"{record.msg} {record.args}"
    return message if "\n" in str(record.msg) else message.replace("\n", "\\n")


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
