"""What a soak says of memory."""

from __future__ import annotations

from collections import Counter

import pytest
from hostile import report
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
