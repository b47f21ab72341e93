"""Which records are written, and how, after `configure`."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples

from wire.log.levels import level_from_filter, levels_of_loggers
from wire.log.log_line import LogLine, parse, to_json
from wire.log.log_setup import configure

LINE = LogLine(
    level="WARN", message="hello", target="router.cli", timestamp="2026-01-02T03:04:05.000006Z", line_number=7, rank=1,
    fields={"n": 3},
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("info", "INFO"), ("DEBUG", "DEBUG"), ("warn", "WARN"), ("off", "OFF"), ("trace", "TRACE"), ("", "INFO"),
        ("nonsense", "INFO"), ("text_generation_router=debug,info", "DEBUG"), ("warn,hyper=off", "WARN"),
    ],
)  # fmt: skip
def test_filters(text: str, level: str) -> None:
    assert level_from_filter(text) == level


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
@settings(max_examples=examples(50, 800))
def test_no_filter_is_refused(text: str) -> None:
    assert level_from_filter(text) in ("TRACE", "DEBUG", "INFO", "WARN", "ERROR", "OFF")
    default, named, _ = levels_of_loggers(text)
    assert isinstance(default, int) and all(isinstance(level, int) for level in named.values())


def test_what_means_nothing_is_said_once() -> None:
    stream = io.StringIO()
    configure(False, "info,what?=ever,router=loud", stream=stream)
    (line,) = written(stream)
    assert "2 parts" in line and "loud" not in line


def test_configured_text() -> None:
    stream = io.StringIO()
    configure(False, "info", stream=stream)
    logging.getLogger("router.cli").info("hi %d", 3, extra={"request_id": "r"})
    logging.getLogger("router.cli").debug("no")
    logging.getLogger("httpx").info("no")
    logging.getLogger("httpx").warning("theirs")
    first, second = written(stream)
    assert " INFO router.cli: test_log_setup.py:" in first and first.endswith(": hi 3 request_id=r")
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
