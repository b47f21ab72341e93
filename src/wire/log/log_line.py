"""The log line: how a process writes it, how the launcher reads it back from a child and writes it again.

One line is one record: text for people, or one JSON object. No line is longer than 64 KiB; control characters are
escaped, so that nothing a client sent can draw on a terminal or forge a record. Knows nothing of pipes or processes.

JSON layouts (all three can be parsed back):
- `flat`      `{timestamp, level, message, target, filename, line_number, ...}`: TGI's router
- `launcher`  `{timestamp, level, fields: {message, ...}, target}`: TGI's launcher
- `shard`     flat, plus `text` and `record.level.name`, the two things that TGI's launcher reads of its shards
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from wire import phases
from wire.log.progress_bars import ProgressFilter, StatusLines

Layout = Literal["flat", "launcher", "shard"]


class Stream(Protocol):
    """Where lines go: any text stream will do."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...
    def isatty(self) -> bool: ...


MAX_LINE_BYTES = 64 * 1024
PACKAGES = ("launcher", "router", "model_server", "wire", "text_generation_launcher")
"""Loggers that follow the asked level; everybody else's start at WARN."""

_TRACE = 5
_OFF = logging.CRITICAL + 10
_TO_PYTHON = {
    "TRACE": _TRACE, "DEBUG": logging.DEBUG, "INFO": logging.INFO, "SUCCESS": logging.INFO, "WARN": logging.WARNING,
    "WARNING": logging.WARNING, "ERROR": logging.ERROR, "CRITICAL": logging.CRITICAL, "FATAL": logging.CRITICAL,
    "OFF": _OFF,
}  # fmt: skip
_LEVELS = _TO_PYTHON | {
    "0": _OFF, "1": logging.ERROR, "2": logging.WARNING, "3": logging.INFO, "4": logging.DEBUG, "5": _TRACE,
}  # fmt: skip
_SPAN_FILTER = re.compile(r"\[[^\]]*\]")
_TARGET = re.compile(r"[A-Za-z_][\w.:-]*")
# TGI's words for our packages.
_TARGETS = {
    "text_generation_router": ("router",),
    "text_generation_server": ("model_server",),
    "text_generation_launcher": ("launcher", "text_generation_launcher"),
}
_KNOWN_TARGETS = frozenset(PACKAGES) | set(_TARGETS)
_RELAYS = dict.fromkeys(("router", "text_generation_router"), ("text_generation_launcher.router",)) | dict.fromkeys(
    ("model_server", "text_generation_server"), ("text_generation_launcher.shard", "text_generation_launcher.download")
)
_COLOURS = {"TRACE": "35", "DEBUG": "34", "INFO": "32", "WARN": "33", "ERROR": "31"}
# C0 but tab and newline, DEL, C1, line separators, and the marks that reorder text on screen.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogLine:
    """One record. `level` is TRACE, DEBUG, INFO, WARN or ERROR; `fields` is what a record carries beyond the rest."""

    level: str
    message: str
    timestamp: str = ""
    target: str = ""
    filename: str = ""
    line_number: int | None = None
    rank: int | None = None
    exception: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def python_level(self) -> int:
        return _TO_PYTHON.get(self.level, logging.INFO)


def level_from_filter(text: str) -> str:
    """The most verbose level that a `LOG_LEVEL` filter (`debug`, `info,router=trace`) names; INFO if it names none."""
    levels = [level for _, level in _directives(text) if level is not None]
    return _level_name(min(levels)) if levels else "INFO"


def _directives(text: str) -> list[tuple[str, int | None]]:
    """Target (empty: everything of ours) and level of each part; the level is None where there is no sense in it.

    tracing's syntax: `level`, `target=level`, `target` alone (all of it). The `[span{field}]` of a part is passed over.
    """
    found: list[tuple[str, int | None]] = []
    for part in _SPAN_FILTER.sub("", text).split(","):
        target, equals, level = (word.strip() for word in part.rpartition("="))
        if not equals and level.partition("::")[0] in _KNOWN_TARGETS:
            target, level = level, "TRACE"
        if level:
            found.append((target, _LEVELS.get(level.upper())))
    return found


def _levels_of_loggers(text: str) -> tuple[int, dict[str, int], int]:
    """The level of our loggers, those of named loggers, and how many parts of the filter mean nothing."""
    directives = _directives(text)
    named: dict[str, int] = {}
    default = next((level for target, level in reversed(directives) if not target and level is not None), logging.INFO)
    num_unknown = 0
    for target, level in directives:
        if level is None or (target and not _TARGET.fullmatch(target)):
            num_unknown += 1
        elif target:
            room = target.partition("::")[0].partition(".")[0]
            for name in _TARGETS.get(room, (target.replace("::", "."),)):
                named[name] = min(level, named.get(name, level))
            # The launcher passes a child's records on through a logger of that child's.
            for child in _RELAYS.get(room, ()):
                named[child] = min(level, named.get(child, level if target == room else default))
    return default, named, num_unknown


def _level_name(number: int) -> str:
    if number >= _OFF:
        return "OFF"
    names = {logging.ERROR: "ERROR", logging.WARNING: "WARN", logging.INFO: "INFO", logging.DEBUG: "DEBUG"}
    return next((name for floor, name in names.items() if number >= floor), "TRACE")


def configure(
    json_output: bool,
    level: str = "INFO",
    *,
    rank: int | None = None,
    layout: Layout | None = None,
    stream: Stream | None = None,
) -> None:
    """Sends this process' `logging` to `stream` (default: standard output), replacing whatever was set up before.

    `level` is a level name or a filter, a comma list of `level` and `logger=level` (`info,router=debug`; TGI's targets
    are understood, what cannot be read is passed over). `rank` is written on every record. `layout` defaults to `shard`
    with a rank, else to `flat`. A stream that breaks loses records, it never raises. Colours: only on a terminal, and
    not with `LOG_COLORIZE` 0, false, no or off. A logger's `extra` becomes fields of the record; a record with
    `extra={"log_line": LogLine, "log_layout": Layout | None}` is a child's, written as it is. On a terminal, records of
    progress become bars (see `progress_bars`).
    """
    target: Stream = sys.stdout if stream is None else stream
    can_draw = not json_output and _is_terminal(target) and os.environ.get("TERM") != "dumb"
    bars = StatusLines(target) if can_draw else None
    number, named, num_unknown = _levels_of_loggers(level)
    handler = _Handler(bars or target)
    if not json_output:
        handler.addFilter(ProgressFilter(bars, rank))
    chosen: Layout = layout or ("flat" if rank is None else "shard")
    colour = not json_output and _is_terminal(target) and _wants_colour(os.environ)
    handler.setFormatter(_Formatter(json_output=json_output, layout=chosen, rank=rank, colour=colour))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(number, logging.WARNING))
    for name in PACKAGES:
        logging.getLogger(name).setLevel(number)
    for name, named_level in named.items():
        logging.getLogger(name).setLevel(named_level)
    if json_output and phases.are_wanted():
        logging.getLogger(phases.LOGGER).setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    if num_unknown:
        logging.getLogger(__name__).warning("LOG_LEVEL: %d parts of the filter mean nothing to us", num_unknown)


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
    def __init__(self, *, json_output: bool, layout: Layout, rank: int | None, colour: bool) -> None:
        super().__init__()
        self._json_output, self._layout, self._rank, self._colour = json_output, layout, rank, colour

    def format(self, record: logging.LogRecord) -> str:
        line = getattr(record, "log_line", None)
        if not isinstance(line, LogLine):
            line = self._line_of(record)
        elif not line.timestamp:
            line = dataclasses.replace(line, timestamp=_rfc3339(record.created))
        layout: Layout = getattr(record, "log_layout", None) or self._layout
        return to_json(line, layout) if self._json_output else to_text(line, colour=self._colour)

    def _line_of(self, record: logging.LogRecord) -> LogLine:
        names_place = self._layout != "launcher"
        fields = {key: value for key, value in vars(record).items() if key not in _OWN_ATTRIBUTES}
        return LogLine(
            level="ERROR" if record.levelno > logging.ERROR else _level_name(record.levelno),
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
    try:
        return record.getMessage()
    except (TypeError, ValueError):  # A wrong format argument must not cost the record.
        return f"{record.msg} {record.args}"


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def escape(text: str) -> str:
    """Control characters but tab and newline as `\\x1b`-like escapes."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def to_text(line: LogLine, *, colour: bool = False) -> str:
    """`TIME LEVEL target: file:line: message key=value rank=N`; further lines of a message are indented."""
    room = MAX_LINE_BYTES - 8192
    place = f"{line.filename}:{line.line_number}: " if line.filename else ""
    fields = dict(line.fields)
    # TGI's place for the span: before the target, with its fields. Its ancestors are for machines.
    span = _cut(escape(_span_text(fields.pop("span", None))), 4096)
    fields.pop("spans", None)
    extras = "".join(f" {key}={_compact(value)}" for key, value in fields.items())
    rank = "" if line.rank is None else f" rank={line.rank}"
    body = _cut(line.message, room) + _cut(extras, room) + rank
    if line.exception:
        body += "\n" + _cut(line.exception, room)
    # Indented, so that no second line can pass for a record of its own.
    body = _cut(_escaped(body, room).replace("\n", "\n  "), room)
    head = span + escape(_cut(line.target, 128)) + ":"
    place = escape(_cut(place, 128))
    if not colour:
        return f"{line.timestamp} {line.level:>5} {head} {place}{body}"
    level = f"\x1b[{_COLOURS.get(line.level, '0')}m{line.level:>5}\x1b[0m"
    return f"\x1b[2m{line.timestamp}\x1b[0m {level} \x1b[2m{head}\x1b[0m {place}{body}"


def _span_text(span: object) -> str:
    """`name{key=value ...}: `; empty if it is no span."""
    if not isinstance(span, dict) or not span.get("name"):
        return ""
    fields = " ".join(f"{key}={json.dumps(value, default=str)}" for key, value in span.items() if key != "name")
    return f"{span['name']}{{{fields}}}: " if fields else f"{span['name']}: "


def to_json(line: LogLine, layout: Layout = "flat") -> str:
    """One JSON object. A record that is too long for a line loses the ends of its texts, then its fields."""
    room = MAX_LINE_BYTES
    for limit, fields in ((room * 3 // 4, line.fields), (room // 4, line.fields), (room // 16, {})):
        message, exception = _escaped(line.message, limit), _escaped(line.exception, limit)
        short = dataclasses.replace(line, message=message, exception=exception, fields=fields)
        text = json.dumps(_record(short, layout), ensure_ascii=False, default=str, separators=(",", ":"))
        if len(text) >= room:
            continue
        text = _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
        if len(text.encode()) < room:
            break
    return text


def _escaped(text: str, limit: int) -> str:
    """Cut before as well: an escape is longer than what it stands for, and a long text takes long."""
    return _cut(escape(_cut(text, limit)), limit)


def _record(line: LogLine, layout: Layout) -> dict[str, Any]:
    record: dict[str, Any] = {"timestamp": line.timestamp, "level": line.level}
    if layout == "launcher":
        record |= {"fields": {"message": line.message, **line.fields}, "target": line.target}
    else:
        record |= {"message": line.message, "target": line.target}
    if line.filename:
        record |= {"filename": line.filename, "line_number": line.line_number}
    if line.rank is not None:
        record["rank"] = line.rank
    if line.exception:
        record["exception"] = line.exception
    if layout == "shard":
        loguru_level = "WARNING" if line.level == "WARN" else line.level
        whole = line.message + (f"\n{line.exception}" if line.exception else "")
        record |= {"text": whole + "\n", "record": {"level": {"name": loguru_level}}}
    if layout != "launcher":
        record = {**line.fields, **record}
    return record


def parse(line: bytes | str) -> LogLine | None:
    """The record of a child's line, in any layout above or loguru's; None if the line is not such a record."""
    text = line.decode("utf-8", "replace") if isinstance(line, bytes) else line
    if not text.lstrip().startswith("{"):
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    return _parse_flat(record) or _parse_loguru(record)


def _parse_flat(record: dict[str, Any]) -> LogLine | None:
    inner = record.get("fields")
    inner = inner if isinstance(inner, dict) else {}
    level, message = record.get("level"), record.get("message", inner.get("message"))
    if not isinstance(level, str) or not isinstance(message, str) or level.upper() not in _TO_PYTHON:
        return None
    known = {"timestamp", "level", "message", "target", "filename", "line_number", "rank", "exception", "fields"}
    known |= {"text", "record"} if "record" in record else set()
    rest = {key: value for key, value in record.items() if key not in known}
    return LogLine(
        level=_tracing_level(level),
        message=message,
        timestamp=_text(record.get("timestamp")),
        target=_text(record.get("target")),
        filename=_text(record.get("filename")),
        line_number=_whole(record.get("line_number")),
        rank=_whole(record.get("rank")),
        exception=_text(record.get("exception")),
        fields={key: value for key, value in inner.items() if key != "message"} | rest,
    )


def _parse_loguru(record: dict[str, Any]) -> LogLine | None:
    inner = record.get("record")
    level = inner.get("level") if isinstance(inner, dict) else None
    name = level.get("name") if isinstance(level, dict) else None
    text = record.get("text")
    if not isinstance(inner, dict) or not isinstance(name, str) or not isinstance(text, str) or name not in _TO_PYTHON:
        return None
    return LogLine(level=_tracing_level(name), message=text.rstrip(), target=_text(inner.get("name")))


def _tracing_level(name: str) -> str:
    return "ERROR" if name.upper() in ("CRITICAL", "FATAL", "OFF") else _level_name(_TO_PYTHON[name.upper()])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _cut(text: str, limit: int) -> str:
    """At most about `limit` bytes of UTF-8."""
    if len(text) * 4 <= limit:
        return text
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= limit:
        return text
    return f"{encoded[:limit].decode('utf-8', 'ignore')}... ({len(encoded)} bytes)"
