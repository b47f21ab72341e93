"""Bars below the log, as a terminal would show them."""

from __future__ import annotations

import io
import logging
import re

import pytest
from support.screen import screen

from wire.log import log_line, log_setup
from wire.log.log_line import LogLine
from wire.log.progress_bars import WIDTH, StatusLines, are_drawn


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        return screen(self.getvalue())


def bar(name: str, done: int, total: int) -> re.Pattern[str]:
    return re.compile(f"{re.escape(name)} +[━╸╺]{{{WIDTH}}} +{100 * done // total}%")


def are(lines: list[str], *wanted: re.Pattern[str] | str) -> bool:
    """Whether these are the lines that are not empty."""
    lines = [line for line in lines if line]
    return len(lines) == len(wanted) and all(
        line == want if isinstance(want, str) else want.fullmatch(line)
        for line, want in zip(lines, wanted, strict=True)
    )


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def of_shard(rank: int, message: str, **fields: object) -> None:
    line = LogLine(level="INFO", message=message, rank=rank, target="model_server", fields=fields)
    extra = {"log_line": line, "log_layout": None}
    logging.getLogger("text_generation_launcher.shard").info("%s", message, extra=extra)


def test_one_line_for_each_rank_below_the_log() -> None:
    terminal = Screen()
    log_setup.configure(False, layout="launcher", stream=terminal)
    of_shard(0, "start 0")
    of_shard(1, "layer 2 of 4", progress="2/4")
    of_shard(0, "layer 1 of 4", progress="1/4")
    of_shard(1, "something else")
    assert [line.split(": ", 1)[-1] for line in terminal.lines[:2]] == ["start 0 rank=0", "something else rank=1"]
    assert are(terminal.lines[2:], bar("Loading weights, rank 0", 1, 4), bar("Loading weights, rank 1", 2, 4))
    of_shard(0, "layer 4 of 4", progress="4/4")
    assert terminal.lines[2].endswith("layer 4 of 4 rank=0")
    assert are(terminal.lines[3:], bar("Loading weights, rank 1", 2, 4))
    logging.getLogger("text_generation_launcher").error("rank 1 is dead")
    assert terminal.lines[3].endswith("rank 1 is dead")
    assert are(terminal.lines[4:])


def test_own_records_of_a_shard_on_a_terminal() -> None:
    terminal = Screen()
    log_setup.configure(False, stream=terminal)
    logging.getLogger("model_server").info("layer 1 of 2", extra={"progress": "1/2"})
    assert are(terminal.lines, bar("Loading weights", 1, 2))


def test_a_bar_with_a_text_of_its_own() -> None:
    terminal = Screen()
    log_setup.configure(False, layout="launcher", stream=terminal)
    line = LogLine(level="INFO", message="half", fields={"progress": "1/2", "bar": "3.0 MiB/s"}, target="download")
    logging.getLogger("text_generation_launcher.download").info("half", extra={"log_line": line})
    assert are(terminal.lines, re.compile(bar("Downloading", 1, 2).pattern + " +3.0 MiB/s"))
    logging.getLogger("launcher").info("all", extra={"progress": "2/2", "bar": ""})
    assert terminal.lines[0].endswith("launcher: all")
    assert are(terminal.lines[1:])


def test_who_can_ask_whether_bars_are_drawn() -> None:
    log_setup.configure(False, stream=io.StringIO())
    assert not are_drawn({})
    assert are_drawn({"TERCET_BARS": "1"})
    log_setup.configure(False, stream=Screen())
    assert are_drawn({})


@pytest.mark.parametrize("term", ["dumb", None])
def test_no_terminal_no_bars(monkeypatch: pytest.MonkeyPatch, term: str | None) -> None:
    stream = io.StringIO() if term is None else Screen()
    if term is not None:
        monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("LOG_COLORIZE", "0")
    log_setup.configure(False, layout="launcher", stream=stream)
    of_shard(0, "layer 1 of 2", progress="1/2")
    assert stream.getvalue().endswith("model_server: layer 1 of 2 rank=0\n")
    assert "\x1b" not in stream.getvalue()


def test_json_keeps_the_field() -> None:
    terminal = Screen()
    log_setup.configure(True, layout="shard", rank=1, stream=terminal)
    logging.getLogger("model_server").info("layer 1 of 2", extra={"progress": "1/2"})
    line = log_line.parse(terminal.getvalue())
    assert line is not None
    assert line.fields["progress"] == "1/2"


@pytest.mark.parametrize("value", ["1/0", "x", "1/2/3", 5, None, "9" * 50 + "/1"])
def test_what_is_no_progress_is_a_record(value: object) -> None:
    terminal = Screen()
    log_setup.configure(False, layout="launcher", stream=terminal)
    of_shard(0, "odd", progress=value)
    assert "odd" in terminal.lines[0]


def test_lines_are_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Screen()
    lines = StatusLines(terminal)
    lines.show(0, "x" * 50)
    assert len(terminal.lines[0]) <= 20 and terminal.lines[0].startswith("xxx")
    assert are(terminal.lines, terminal.lines[0])
    lines.remove(1)
    lines.clear()
    assert are(terminal.lines)


def test_a_broken_stream_raises_nothing() -> None:
    terminal = Screen()
    lines = StatusLines(terminal)
    terminal.close()
    lines.show(0, "x")
