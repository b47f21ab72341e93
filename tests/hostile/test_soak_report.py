"""What a soak says of memory, and of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from pathlib import Path

import pytest
from hostile import report
from hostile.loop_watch import Hold, Watch, file_in, holds_in
from hostile.report import Report
from hostile.rounds import Outcome

MIB = 1 << 20


def _grown(monkeypatch: pytest.MonkeyPatch, looks: list[tuple[float, str, int]]) -> Report:
    """Of looks (minute, attack, MiB of the router)."""
    now = 0.0
    monkeypatch.setattr(report.time, "monotonic", lambda: now)
    made = Report(commit="c", seed=1)
    for minute, attack, size in looks:
        now = 60 * minute
        made.add(Outcome(attack, 1.0, Counter(), {"router": size * MIB}))
    return made


def test_growth_is_between_looks_behind_the_same_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [(11, "bodies", 100), (12, "responses", 120), (40, "bodies", 101), (41, "responses", 121)]
    found = _grown(monkeypatch, [(1, "bodies", 50), *rounds])
    assert found.growth["router"] == pytest.approx((1 / 100 + 1 / 120) / 2)
    assert found.is_good and "router +0.9%" in found.text()


def test_a_process_that_grows_is_no_good(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(minute, attack, 100 + minute) for minute in (11, 40, 60) for attack in ("bodies", "responses")]
    assert not _grown(monkeypatch, looks).is_good


def test_a_short_soak_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _grown(monkeypatch, [(1, "bodies", 50), (11, "bodies", 100)])
    assert found.growth == {} and "too short" in found.text()


def test_the_slowest_hold_and_the_longest_wait_are_told() -> None:
    made = Report(commit="c", seed=1)
    for used_s, longest in ((0.02, 7), (0.05, 9), (0.03, 8)):
        seen = Counter({"longest /info, ms": longest, "200": 1})
        made.add(Outcome("bodies", 1.0, seen, slowest=Hold(0.5, used_s, "a.py:1 f < b.py:2 g")))
    made.add(Outcome("leaving", 1.0, Counter()))
    assert "| bodies | 3 | 200 3, longest /info, ms 9 | 50 ms (500 by the clock) |" in made.text()
    assert "Slowest hold of the event loop: 50 ms (500 by the clock) in bodies: a.py:1 f < b.py:2 g." in made.text()


async def test_a_hold_is_written_down_with_what_ran(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    assert holds_in(file, 0) == ([], 0)
    beating = asyncio.create_task(Watch(file).beat())
    await asyncio.sleep(0.05)
    _, begin = holds_in(file, 0)
    _hold_the_loop()
    async with asyncio.timeout(60):
        while not (found := [hold for hold in holds_in(file, begin)[0] if hold.wall_s > 0.3]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    beating.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await beating
    assert found[0].used_s > 0.25 and "_hold_the_loop" in found[0].stack


def _hold_the_loop() -> None:
    until = time.thread_time() + 0.4
    while time.thread_time() < until:
        pass
