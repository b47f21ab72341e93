"""The log line: how a record is spelled, and read back from a child."""

# One line is one record: text for people, or one JSON object. No line is longer than 64 KiB; control characters are
# escaped, so that nothing a client sent can draw on a terminal or forge a record. Knows nothing of pipes or processes.
#
# JSON layouts (all three can be parsed back):
# - `flat`      `{timestamp, level, message, target, filename, line_number, ...}`: TGI's router
# - `launcher`  `{timestamp, level, fields: {message, ...}, target}`: TGI's launcher
# - `shard`     flat, plus `text` and `record.level.name`, the two things that TGI's launcher reads of its shards

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any, Literal

from wire.log.levels import TO_PYTHON, tracing_level
from wire.text.escape import CONTROL, cut, escape, one_line, shown

Layout = Literal["flat", "launcher", "shard"]


MAX_LINE_BYTES = 64 * 1024
_COLOURS = {"TRACE": "35", "DEBUG": "34", "INFO": "32", "WARN": "33", "ERROR": "31"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogLine:
    """One record; `fields` is what it carries beyond the rest."""

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
        return TO_PYTHON.get(self.level, logging.INFO)


def to_text(line: LogLine, *, colour: bool = False) -> str:
    """`TIME LEVEL target: file:line: message key=value rank=N`; further lines of a message are indented."""
    limit = MAX_LINE_BYTES - 8192
    place = f"{line.filename}:{line.line_number}: " if line.filename else ""
    fields = dict(line.fields)
    # TGI's place for the span: before the target, with its fields. Its ancestors are for machines.
    span = cut(escape(_span_text(fields.pop("span", None))), 4096)
    fields.pop("spans", None)
    extras = "".join(f" {key}={one_line(cut(_compact(value), limit))}" for key, value in fields.items())
    rank = "" if line.rank is None else f" rank={line.rank}"
    body = cut(line.message, limit) + cut(extras, limit) + rank
    if line.exception:
        body += "\n" + cut(line.exception, limit)
    # Indented, so that no second line can pass for a record of its own.
    body = cut(shown(body, limit).replace("\n", "\n  "), limit)
    head = span + escape(cut(line.target, 128)) + ":"
    place = escape(cut(place, 128))
    if not colour:
        return f"{line.timestamp} {line.level:>5} {head} {place}{body}"
    level = f"\x1b[{_COLOURS.get(line.level, '0')}m{line.level:>5}\x1b[0m"
    return f"\x1b[2m{line.timestamp}\x1b[0m {level} \x1b[2m{head}\x1b[0m {place}{body}"


def _span_text(span: object) -> str:
    """`name{key=value ...}: `; empty if it is not a span."""
    if not isinstance(span, dict) or not span.get("name"):
        return ""
    fields = " ".join(f"{key}={json.dumps(value, default=str)}" for key, value in span.items() if key != "name")
    return f"{span['name']}{{{fields}}}: " if fields else f"{span['name']}: "


def to_json(line: LogLine, layout: Layout = "flat") -> str:
    """Write one JSON object, shortened by texts' ends, then fields."""
    most = MAX_LINE_BYTES
    for limit, fields in ((most * 3 // 4, line.fields), (most // 4, line.fields), (most // 16, {})):
        message, exception = shown(line.message, limit), shown(line.exception, limit)
        short = dataclasses.replace(line, message=message, exception=exception, fields=fields)
        text = json.dumps(_record(short, layout), ensure_ascii=False, default=str, separators=(",", ":"))
        if len(text) >= most:
            continue
        text = CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
        if len(text.encode()) < most:
            break
    return text


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
    """Read a child's line in any layout, loguru's included, if it is a record."""
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
    if not isinstance(level, str) or not isinstance(message, str) or level.upper() not in TO_PYTHON:
        return None
    known = {"timestamp", "level", "message", "target", "filename", "line_number", "rank", "exception", "fields"}
    known |= {"text", "record"} if "record" in record else set()
    rest = {key: value for key, value in record.items() if key not in known}
    return LogLine(
        level=tracing_level(level),
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
    if not isinstance(inner, dict) or not isinstance(name, str) or not isinstance(text, str) or name not in TO_PYTHON:
        return None
    return LogLine(level=tracing_level(name), message=text.rstrip(), target=_text(inner.get("name")))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
