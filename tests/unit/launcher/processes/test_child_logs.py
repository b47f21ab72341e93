"""Lines out of bytes, in bounded memory, whatever a child prints."""

from __future__ import annotations

import io
import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.processes.child_logs import ChildLogs, KeptLines, LineSplitter
from launcher.processes.output import Output
from wire.log import log_line, log_setup
from wire.log.log_line import LogLine, to_json


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_splitting_does_not_depend_on_the_pieces(pieces: list[bytes]) -> None:
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece)]
    lines += splitter.finish()
    whole = b"".join(pieces).split(b"\n")
    if whole[-1] == b"":
        whole.pop()
    assert lines == [line.rstrip(b"\r") for line in whole]


def test_a_long_line_is_cut_and_the_next_is_whole() -> None:
    splitter = LineSplitter(limit=10)
    lines = [line for _ in range(5) for line in splitter.feed(b"abcdef")]
    lines += splitter.feed(b"\nnext\n")
    assert lines == [b"abcdefabcd ... (20 bytes more)", b"next"]


def test_kept_lines_are_bounded() -> None:
    kept = KeptLines()
    for index in range(5000):
        kept.add(f"line {index}")
    text = "\n".join(kept.chunks())
    assert text.startswith("... 3000 earlier lines\nline 3000\n") and text.endswith("line 4999")
    for _ in range(100):
        kept.add("x" * 60_000)
    assert sum(map(len, kept.chunks())) < 1_200_000
    assert all(len(chunk) < 100_000 for chunk in kept.chunks())
    assert list(KeptLines().chunks()) == []


@pytest.fixture
def log() -> io.StringIO:
    stream = io.StringIO()
    log_setup.configure(False, "info", layout="launcher", stream=stream)
    return stream


def feed(name: str, rank: int | None, stdout: bytes, stderr: bytes = b"") -> ChildLogs:
    pipes = [os.pipe(), os.pipe()]
    logs = ChildLogs(name, rank, pipes[0][0], pipes[1][0])
    for (_, end), data in zip(pipes, (stdout, stderr), strict=True):
        with os.fdopen(end, "wb") as file:
            file.write(data)
    logs.finish(10)
    return logs


def test_records_get_their_rank(log: io.StringIO) -> None:
    records = [
        LogLine(level="INFO", message="loading", timestamp="T", target="model_server"),
        LogLine(level="ERROR", message="bad", timestamp="T", target="model_server"),
        LogLine(level="INFO", message="bye", timestamp="T", target="model_server"),
    ]
    logs = feed("shard", 3, "".join(to_json(line, "shard") + "\n" for line in records).encode())
    assert log.getvalue().splitlines() == [
        "T  INFO model_server: loading rank=3", "T ERROR model_server: bad rank=3", "T  INFO model_server: bye rank=3"
    ]  # fmt: skip
    assert (logs.last_message, logs.last_error) == ("bye", "bad")


def test_other_output_is_shown_escaped(log: io.StringIO) -> None:
    feed("shard", 0, b"plain \x1b[2J\xff\n\n  \n{broken")
    lines = log.getvalue().splitlines()
    assert [line.partition(" INFO ")[2] for line in lines] == [
        "shard: plain \\x1b[2J\N{REPLACEMENT CHARACTER} rank=0", "shard: {broken rank=0"
    ]  # fmt: skip


def test_standard_error_is_kept_not_shown(log: io.StringIO) -> None:
    logs = feed("router", None, b"", b"Traceback\n  boom\n")
    assert "\n".join(logs.errors.chunks()) == "Traceback\n  boom"
    assert log.getvalue() == ""


def test_a_record_of_200_kib_is_understood(log: io.StringIO) -> None:
    feed("shard", 0, b'{"level":"WARN","message":"' + b"x" * 200_000 + b'"}\n{"level":"INFO","message":"next"}\n')
    first, second = log.getvalue().splitlines()
    assert " WARN " in first and len(first) <= log_line.MAX_LINE_BYTES
    assert second.endswith("next rank=0")


def test_phases_are_kept_and_shown_to_who_looks_closer(log: io.StringIO) -> None:
    read, write = os.pipe()
    other_read, other_write = os.pipe()
    os.close(other_write)
    logs = ChildLogs("shard", 1, read, other_read)
    lines = [
        LogLine(level="INFO", message="Found the weights", fields={"phase": "of somebody else"}),
        LogLine(level="DEBUG", message="Phase: loading", target="wire.phases", fields={"phase": "loading"}),
        LogLine(level="INFO", message="Loading weights: layer 3 of 9", fields={"progress": "3/9"}),
    ]
    with os.fdopen(write, "w") as file:
        for line in lines:
            file.write(to_json(line, "shard") + "\n")
    logs.finish(10)
    assert [name for name, _ in logs.progress.began] == ["starting", "loading"]
    assert str(logs.progress).startswith("loading 3/9 layers for ")
    assert logs.last_message == "Loading weights: layer 3 of 9"
    assert "Phase" not in log.getvalue()
    end = logs.progress.began[-1][1] + 2.0
    assert dict(logs.progress.durations(end))["loading"] == 2.0
    before = (logs.progress.began[0][1] + logs.progress.began[1][1]) / 2
    assert [name for name, _ in logs.progress.durations(before)] == ["starting"]


def test_a_flood_without_newlines_takes_no_memory(log: io.StringIO) -> None:
    read, write = os.pipe()
    other_read, other_write = os.pipe()
    os.close(other_write)
    logs = ChildLogs("shard", 0, read, other_read)
    block = b"\x00\xff" * 32768
    with os.fdopen(write, "wb") as file:
        for _ in range(500):
            file.write(block)
    logs.finish(30)
    (line,) = log.getvalue().splitlines()
    assert len(line.encode()) <= log_line.MAX_LINE_BYTES


@pytest.mark.parametrize("json_lines", [False, True])
def test_output_never_blocks(json_lines: bool) -> None:
    read, write = os.pipe()
    output = Output(write, buffer_bytes=200_000, json_lines=json_lines)
    for _ in range(100):
        output.write("x" * 10_000 + "\n")  # Nobody reads: the pipe is full after six of them.
    received: list[bytes] = []

    def drain() -> None:
        with os.fdopen(read, "rb") as file:
            received.append(file.read())

    reader = threading.Thread(target=drain)
    reader.start()
    output.finish(10)
    os.close(write)
    reader.join(60)
    lines = received[0].splitlines()
    assert 20 <= len(lines) < 100
    note = json.loads(lines[-1])["fields"]["message"] if json_lines else lines[-1].decode()
    assert note.endswith("writes dropped: the reader is too slow")
    assert all(line == b"x" * 10_000 for line in lines[:-1])


def test_output_survives_a_closed_reader() -> None:
    read, write = os.pipe()
    os.close(read)
    output = Output(write)
    for _ in range(10):
        output.write("x\n")
    output.finish(10)
    output.write("after the end\n")
    os.close(write)
    assert not output.isatty()


def test_output_does_not_wait_for_ever_at_the_end() -> None:
    read, write = os.pipe()
    output = Output(write)
    output.write("x" * 1_000_000)
    output.finish(0.05)
    os.close(read)  # Lets the thread go.
    output.finish(10)
    os.close(write)


def test_output_keeps_everything_for_a_patient_reader() -> None:
    read, write = os.pipe()
    output = Output(write)
    output.write("grüße \ud800\n")
    output.write("end\n")
    output.finish(10)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        assert file.read().decode() == "grüße \\ud800\nend\n"
