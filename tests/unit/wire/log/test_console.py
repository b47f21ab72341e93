"""The short log of a terminal: what is shown of which record, and how."""

from __future__ import annotations

import io
import logging
import re

import pytest

from wire.log import log_setup
from wire.log.console import Console
from wire.log.log_line import LogLine


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("LOG_COLORIZE", "0")


@pytest.fixture
def screen() -> Tty:
    return Tty()


@pytest.fixture
def console(screen: Tty) -> Console:
    made = log_setup.configure(False, layout="launcher", stream=screen, short=True)
    assert made is not None
    return made


def of_child(name: str, line: LogLine) -> None:
    logger = logging.getLogger(f"text_generation_launcher.{name}")
    logger.log(line.python_level, "%s", line.message, extra={"log_line": line, "log_layout": None})


def test_own_records(console: Console, screen: Tty) -> None:
    logger = logging.getLogger("text_generation_launcher")
    logger.info("details")
    logger.info("that it stops", extra={"on_console": True})
    logger.warning("odd")
    logger.error("the crash report", extra={"on_console": False})
    logger.error("two\nlines\x1b[2J")
    assert screen.getvalue() == "that it stops\nwarning: odd\nerror: two\n  lines\\x1b[2J\n"


def test_a_warning_of_every_rank_is_shown_once(console: Console, screen: Tty) -> None:
    for rank in range(8):
        of_child("shard", LogLine(level="WARN", message="no operators", rank=rank, target="model_server.cpp"))
        of_child("shard", LogLine(level="INFO", message="loaded", rank=rank, target="model_server.load"))
    assert screen.getvalue() == "warning: rank 0: no operators\n"


def test_errors_of_children_count_once_they_serve(console: Console, screen: Tty) -> None:
    of_child("shard", LogLine(level="ERROR", message="cannot start", rank=1))
    assert screen.getvalue() == ""
    console.filter.is_starting = False
    of_child("shard", LogLine(level="ERROR", message="out of memory", rank=1))
    of_child("router", LogLine(level="ERROR", message="Refused: validation", target="router.api.errors"))
    of_child("router", LogLine(level="ERROR", message="a stream has failed", target="router.api.errors",
                               fields={"request_id": "7"}, exception="Traceback"))  # fmt: skip
    assert screen.getvalue() == "error: rank 1: out of memory\nerror: a stream has failed\n  Traceback\n"


def test_requests_and_ignored_parameters(console: Console, screen: Tty) -> None:
    of_child("router", LogLine(level="INFO", message="Success", target="router.generation.running"))
    of_child("router", LogLine(level="INFO", message="200 POST /generate", target="router.requests",
                               timestamp="2026-01-01T00:00:00.5Z", fields={"request_id": "7"}))  # fmt: skip
    of_child("router", LogLine(level="INFO", message="`x` is ignored", target="router.schemas.unknown"))
    request, note, end = screen.getvalue().split("\n")
    assert re.fullmatch(r"\d\d:\d\d:00  200 POST /generate", request)
    assert (note, end) == ("note: `x` is ignored", "")


def test_loading_draws_no_bars_of_its_own_downloads_do(console: Console, screen: Tty) -> None:
    of_child("shard", LogLine(level="INFO", message="half", rank=0, fields={"progress": "1/2"}))
    assert screen.getvalue() == ""
    of_child("download", LogLine(level="INFO", message="half", fields={"progress": "1/2", "bar": "3 MiB/s"}))
    assert "Downloading" in screen.getvalue() and "3 MiB/s" in screen.getvalue()


@pytest.mark.parametrize(("json_output", "is_terminal"), [(True, True), (False, False), (True, False)])
def test_pipes_and_json_have_the_whole_log(json_output: bool, is_terminal: bool) -> None:
    stream = Tty() if is_terminal else io.StringIO()
    assert log_setup.configure(json_output, layout="launcher", stream=stream, short=True) is None
    logger = logging.getLogger("text_generation_launcher")
    logger.info("details")
    logger.error("the crash report", extra={"on_console": False})
    assert "details" in stream.getvalue() and "the crash report" in stream.getvalue()
    assert "on_console" not in stream.getvalue()
