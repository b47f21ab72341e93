"""What is written can be read back; what cannot be read back does no harm."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.log.log_line import MAX_LINE_BYTES, Layout, LogLine, parse, to_json, to_text

LAYOUTS: tuple[Layout, ...] = ("flat", "launcher", "shard")
LINE = LogLine(
    level="WARN", message="hello", timestamp="2026-01-02T03:04:05.000006Z", target="router.cli", filename="app.py",
    line_number=7, rank=1, exception="Traceback: x", fields={"total_time": "1ms", "n": 3},
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_json_reads_back(layout: Layout) -> None:
    text = to_json(LINE, layout)
    assert "\n" not in text
    assert parse(text) == LINE
    assert parse(text.encode() + b"\r\n") == LINE


def test_layouts_have_the_fields_of_tgi() -> None:
    flat, launcher, shard = (json.loads(to_json(LINE, layout)) for layout in LAYOUTS)
    assert (flat["level"], flat["message"], flat["target"], flat["line_number"]) == (
        "WARN",
        "hello",
        "router.cli",
        7,
    )
    assert flat["total_time"] == "1ms"
    assert launcher["fields"] == {"message": "hello", "total_time": "1ms", "n": 3}
    assert "message" not in launcher
    assert shard["text"] == "hello\nTraceback: x\n"
    assert shard["record"]["level"]["name"] == "WARNING"


def test_record_of_tgis_own_shard() -> None:
    record = {
        "text": "Shard is loading\nTraceback\n",
        "record": {"level": {"icon": "x", "name": "SUCCESS", "no": 25}, "message": "Shard is loading", "name": "cli"},
    }
    line = parse(json.dumps(record))
    assert line is not None
    assert (line.level, line.message, line.target) == ("INFO", "Shard is loading\nTraceback", "cli")


@pytest.mark.parametrize(
    ("name", "level", "python_level"),
    [("CRITICAL", "ERROR", 40), ("warning", "WARN", 30), ("debug", "DEBUG", 10), ("TRACE", "TRACE", 5)],
)
def test_levels(name: str, level: str, python_level: int) -> None:
    line = parse(json.dumps({"level": name, "message": "m"}))
    assert line is not None
    assert (line.level, line.python_level) == (level, python_level)


@pytest.mark.parametrize(
    "text",
    [
        "", "hello", "{", "[1]", "{}", '"text"', "null", '{"level":"INFO"}', '{"message":"m"}',
        '{"level":3,"message":"m"}', '{"level":"LOUD","message":"m"}', '{"level":"INFO","message":5}',
        '{"text":"m","record":{}}', '{"text":"m","record":{"level":{"name":7}}}', '{"fields":7,"level":"INFO"}',
        "{" * 100_000, '{"a":' * 100_000,
    ],
)  # fmt: skip
def test_not_a_record(text: str) -> None:
    assert parse(text) is None


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_are_survived(data: bytes) -> None:
    parse(data)
    parse(b"{" + data)


@given(st.text(max_size=50), st.text(max_size=20), st.sampled_from(LAYOUTS))
@settings(deadline=None)
def test_any_text_is_one_printable_line(message: str, value: str, layout: Layout) -> None:
    line = LogLine(level="INFO", message=message, target="t", fields={"value": value})
    text = to_json(line, layout)
    assert all(character.isprintable() or character >= "\xa0" for character in text)
    assert len(text.splitlines()) == 1
    again = parse(text.encode())
    assert again is not None
    assert "\x1b" not in to_text(line)
    for extra in to_text(line).split("\n")[1:]:
        assert extra.startswith("  ")


def test_control_characters_are_escaped() -> None:
    evil = LogLine(level="INFO", message="\x1b[31m\r\x00\x9b\u202e\ntwo", target="t")
    assert to_text(evil).endswith("t: \\x1b[31m\\r\\x00\\x9b\\u202e\n  two")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("character", ["a", "é", "\x01", '"', "😀"])
def test_lines_are_capped(layout: Layout, character: str) -> None:
    big = character * 300_000
    line = LogLine(level="ERROR", message=big, exception=big, fields={"x": big}, target="t")
    text = to_json(line, layout)
    assert len(text.encode()) < MAX_LINE_BYTES
    again = parse(text)
    assert again is not None and again.level == "ERROR"
    assert len(to_text(line).encode()) <= MAX_LINE_BYTES


def test_text_form() -> None:
    assert to_text(LINE) == (
        "2026-01-02T03:04:05.000006Z  WARN router.cli: app.py:7: hello total_time=1ms n=3 rank=1\n  Traceback: x"
    )


def test_a_span_in_text() -> None:
    span = {"name": "generate", "total_time": "1ms", "seed": 'a"\x1b'}
    line = dataclasses.replace(LINE, fields={"n": 3, "span": span, "spans": [span]}, rank=None, exception="")
    spelled = 'generate{total_time="1ms" seed="a\\"\\u001b"}'
    assert to_text(line) == f"2026-01-02T03:04:05.000006Z  WARN {spelled}: router.cli: app.py:7: hello n=3"
    assert parse(to_json(line)) == line
    for other in ({}, "x", {"total_time": 1}):
        assert ": hello n=3" in to_text(dataclasses.replace(line, fields={"n": 3, "span": other}))
