"""The case "endpoints" of the router's benchmark."""

from __future__ import annotations

from pathlib import Path

from benchmarks.router.endpoints import lines
from benchmarks.router.null_shard import _plans


def test_every_rank_is_behind_one_endpoint() -> None:
    paths = [f"/tmp/rank-{rank}" for rank in range(8)]
    plans = _plans(paths, 4)
    assert [path for plan in plans for path in plan.sockets] == [Path(path) for path in paths]
    assert [len(plan.sockets) for plan in plans] == [2] * 4 and len({plan.url for plan in plans}) == 4
    assert _plans(paths, 0) == []


def test_the_report_divides_a_call_by_what_is_called() -> None:
    cells = {
        "64 ranks, 8 endpoints": {"ranks": 64, "endpoints": 8, "cpu_us_per_call": 2000.0},
        "8 ranks, each called by the router": {"ranks": 8, "endpoints": 0, "cpu_us_per_call": 1200.0},
    }
    assert [figure for _, figure, _ in lines(cells)] == [
        "2,000 us, 250 us for each called",
        "1,200 us, 150 us for each called",
    ]
