"""When a rank speaks while it loads."""

from __future__ import annotations

import logging

import pytest

from model_server.weights import load_progress as progress
from model_server.weights.load_progress import LoadProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def spoken(caplog: pytest.LogCaptureFixture, clock: list[float], layers: int, seconds_each: float) -> list[str]:
    caplog.set_level(logging.INFO)
    load = LoadProgress()
    for layer in range(1, layers + 1):
        clock[0] += seconds_each
        load(layer, layers)
    return [getattr(record, "progress", "") for record in caplog.records]


def test_every_tenth(caplog: pytest.LogCaptureFixture, clock: list[float]) -> None:
    assert spoken(caplog, clock, 80, 1.0) == [f"{8 * n}/80" for n in range(1, 11)]
    assert caplog.records[0].getMessage() == "Loading weights: layer 8 of 80 (10 %)"


def test_at_most_one_in_a_second_but_the_last(caplog: pytest.LogCaptureFixture, clock: list[float]) -> None:
    assert spoken(caplog, clock, 10, 0.35) == ["3/10", "6/10", "9/10", "10/10"]


def test_a_short_load_is_silent(caplog: pytest.LogCaptureFixture, clock: list[float]) -> None:
    assert spoken(caplog, clock, 10, 0.05) == []
