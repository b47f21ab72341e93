"""What is written can be read back; what cannot be read back does no harm."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.log import log_line
from wire.log.log_line import MAX_LINE_BYTES, Layout, LogLine, configure, parse, to_json, to_text

LAYOUTS: tuple[Layout, ...] = ("flat", "launcher", "shard")
LINE = LogLine(
    level="WARN", message="hello", timestamp="2026-01-02T03:04:05.000006Z", target="router.cli", filename="app.py",
    line_number=7, rank=1, exception="Traceback: x", fields={"total_time": "1ms", "n": 3},
)  # fmt: skip


@pytest.fixture(autouse=True)
def restored_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = logging.getLogger()
    names = ["", *log_line.PACKAGES]
    levels = [logging.getLogger(name).level for name in names]
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    yield
    logging.captureWarnings(False)
    for name, level in zip(names, levels, strict=True):
        logging.getLogger(name).setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


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


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("info", "INFO"), ("DEBUG", "DEBUG"), ("warn", "WARN"), ("off", "OFF"), ("trace", "TRACE"), ("", "INFO"),
        ("nonsense", "INFO"), ("text_generation_router=debug,info", "DEBUG"), ("warn,hyper=off", "WARN"),
    ],
)  # fmt: skip
def test_filters(text: str, level: str) -> None:
    assert log_line.level_from_filter(text) == level


def shown(filter_text: str, *names: str) -> dict[str, str]:
    """The least level that each logger writes under a filter."""
    configure(False, filter_text, stream=io.StringIO())
    levels = (5, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, 60)
    words = dict(zip(levels, ("trace", "debug", "info", "warn", "error", "off"), strict=True))
    return {
        name: next(words[level] for level in levels if logging.getLogger(name).isEnabledFor(level)) for name in names
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("debug", {"router.cli": "debug", "model_server": "debug", "hyper": "warn"}),
        ("warn", {"router.cli": "warn", "hyper": "warn"}),
        ("error", {"router.cli": "error", "hyper": "error"}),
        ("warn,router=debug", {"router.cli": "debug", "launcher": "warn", "text_generation_launcher": "warn"}),
        ("router=debug", {"router.cli": "debug", "launcher": "info"}),
        ("text_generation_router::server=debug,warn", {"router.cli": "debug", "model_server": "warn"}),
        ("text_generation_launcher=error", {"launcher": "error", "text_generation_launcher": "error"}),
        ("info,router.scheduling=trace", {"router.scheduling.loop": "trace", "router.cli": "info"}),
        ("info,tower_http::trace=debug", {"tower_http.trace": "debug", "router": "info"}),
        ("text_generation_router", {"router": "trace", "launcher": "info"}),
        ("info,router[request{id=1,b}]=debug", {"router": "debug", "launcher": "info"}),
        ("4", {"router": "debug"}),
        (" Info , Router = 0 ", {"launcher": "info", "router": "info", "Router": "off"}),
    ],
)
def test_filter_expressions(text: str, expected: dict[str, str], fresh_loggers: None) -> None:
    assert shown(text, *expected) == expected


@pytest.mark.parametrize(
    ("text", "relayed"),
    [
        ("warn,router=debug", {"router": "debug", "shard": "warn", "download": "warn"}),
        ("info,model_server=error", {"router": "info", "shard": "error", "download": "error"}),
        ("info,router.scheduling=error", {"router": "info", "shard": "info"}),
        ("warn,router.scheduling=debug", {"router": "debug", "shard": "warn"}),
    ],
)
def test_the_launcher_passes_on_what_the_filter_lets_through(
    text: str, relayed: dict[str, str], fresh_loggers: None
) -> None:
    names = {f"text_generation_launcher.{child}": level for child, level in relayed.items()}
    assert shown(text, *names) == names


@pytest.fixture
def fresh_loggers() -> Iterator[None]:
    """Levels that a filter sets on loggers of other names end with the test."""
    known = {name: logging.getLogger(name).level for name in logging.root.manager.loggerDict}
    yield
    for name in list(logging.root.manager.loggerDict):
        logging.getLogger(name).setLevel(known.get(name, logging.NOTSET))


@given(st.text(max_size=60) | st.text("=,[]{}:. infodebug0123", max_size=60))
@settings(max_examples=200)
def test_no_filter_is_refused(text: str) -> None:
    assert log_line.level_from_filter(text) in ("TRACE", "DEBUG", "INFO", "WARN", "ERROR", "OFF")
    default, named, _ = log_line._levels_of_loggers(text)
    assert isinstance(default, int) and all(isinstance(level, int) for level in named.values())


def test_what_means_nothing_is_said_once() -> None:
    stream = io.StringIO()
    configure(False, "info,what?=ever,router=loud", stream=stream)
    (line,) = written(stream)
    assert "2 parts" in line and "loud" not in line


def test_a_span_in_text() -> None:
    span = {"name": "generate", "total_time": "1ms", "seed": 'a"\x1b'}
    line = dataclasses.replace(LINE, fields={"n": 3, "span": span, "spans": [span]}, rank=None, exception="")
    spelled = 'generate{total_time="1ms" seed="a\\"\\u001b"}'
    assert to_text(line) == f"2026-01-02T03:04:05.000006Z  WARN {spelled}: router.cli: app.py:7: hello n=3"
    assert parse(to_json(line)) == line
    for other in ({}, "x", {"total_time": 1}):
        assert ": hello n=3" in to_text(dataclasses.replace(line, fields={"n": 3, "span": other}))


def test_configured_text() -> None:
    stream = io.StringIO()
    configure(False, "info", stream=stream)
    logging.getLogger("router.cli").info("hi %d", 3, extra={"request_id": "r"})
    logging.getLogger("router.cli").debug("no")
    logging.getLogger("httpx").info("no")
    logging.getLogger("httpx").warning("theirs")
    first, second = written(stream)
    assert " INFO router.cli: test_log_line.py:" in first and first.endswith(": hi 3 request_id=r")
    assert second.endswith(": theirs")


def test_configured_shard() -> None:
    stream = io.StringIO()
    configure(True, "DEBUG", rank=2, stream=stream)
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("model_server").exception("failed")
    (text,) = written(stream)
    line = parse(text)
    assert line is not None
    assert (line.level, line.message, line.rank, line.target) == ("ERROR", "failed", 2, "model_server")
    assert line.exception.endswith("ValueError: why")
    assert json.loads(text)["record"]["level"]["name"] == "ERROR"
    assert line.timestamp.endswith("Z") and "T" in line.timestamp


def test_a_childs_record_is_written_as_it_is() -> None:
    stream = io.StringIO()
    configure(True, "info", layout="launcher", stream=stream)
    log = logging.getLogger("text_generation_launcher")
    log.log(LINE.python_level, "x", extra={"log_line": LINE, "log_layout": "flat"})
    log.log(LINE.python_level, "x", extra={"log_line": LINE, "log_layout": None})
    flat, launcher = written(stream)
    assert flat == to_json(LINE, "flat")
    assert launcher == to_json(LINE, "launcher")


def test_configuring_again_replaces() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure(False, stream=first)
    configure(False, stream=second)
    logging.getLogger("launcher").warning("x")
    assert first.getvalue() == ""
    assert len(written(second)) == 1


@pytest.mark.parametrize(("value", "coloured"), [(None, True), ("1", True), ("0", False), ("off", False)])
def test_colours(value: str | None, coloured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOG_COLORIZE", raising=False)
    if value is not None:
        monkeypatch.setenv("LOG_COLORIZE", value)
    for stream, expected in ((Terminal(), coloured), (io.StringIO(), False)):
        configure(False, stream=stream)
        logging.getLogger("launcher").warning("x")
        assert ("\x1b[33m" in stream.getvalue()) is expected
    terminal = Terminal()
    configure(True, stream=terminal)
    logging.getLogger("launcher").warning("x")
    assert "\x1b" not in terminal.getvalue()


def test_a_broken_stream_is_survived(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    configure(False, stream=stream)
    stream.close()
    logging.getLogger("launcher").warning("x")
    assert capsys.readouterr().err == ""


def test_wrong_arguments_do_not_cost_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    configure(False, stream=stream)
    logging.getLogger("launcher").warning("%d apples", "many")
    assert "%d apples" in stream.getvalue() and "many" in stream.getvalue()
