"""What a download says while it lasts."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from support.hub_server import wait_until

from model_server.weights.download.progress import DownloadProgress, interval, size


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_records_of_bytes_rate_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    progress = DownloadProgress(2, 4 * 2**20, every_s=0.05)
    progress.found(2**20)
    progress.received(2**20)
    with progress:  # no record is written before all is counted
        wait_until(lambda: caplog.messages, "a record")
    pattern = r"Downloading: 2\.0 MiB of 4\.0 MiB \(50 %\), [\d.]+ [KMG]?i?B/s, \d+ s left"
    assert re.fullmatch(pattern, caplog.messages[-1])
    assert caplog.records[-1].__dict__["progress"] == "500/1000"


def test_what_was_there_is_no_rate(caplog: pytest.LogCaptureFixture) -> None:
    progress = DownloadProgress(1, 2000, every_s=0.02)
    progress.found(1000)
    with progress:
        wait_until(lambda: caplog.messages, "a record")
    assert caplog.messages[0] == "Downloading: 1000 B of 2.0 KiB (50 %), 0 B/s, unknown left"


def test_the_end_takes_the_bar_away(caplog: pytest.LogCaptureFixture) -> None:
    with DownloadProgress(2, 100, every_s=3600) as progress:
        progress.received(40)
        progress.file_done(Path("/a"), 1.0)
        progress.received(60)
        progress.file_done(Path("/b"), 2.0)
    assert caplog.messages[0] == "Downloaded /a in 1.0 s."
    assert re.fullmatch(r"Download: \[1/2] -- ETA: \d+ s", caplog.messages[1])
    assert caplog.messages[-1] == "Download: [2/2] -- ETA: 0 s"
    assert [record.__dict__.get("progress") for record in caplog.records] == [None, None, None, "1000/1000"]


def test_bars_move_more_often_than_records_are_written() -> None:
    assert (interval(with_bars=True), interval(with_bars=False)) == (1.0, 10.0)


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1024, 5 * 2**30, 2**80)] == [
        "0 B", "1023 B", "1.0 KiB", "5.0 GiB", "1048576.0 EiB",
    ]  # fmt: skip
