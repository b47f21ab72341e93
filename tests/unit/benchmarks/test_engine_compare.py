"""Two configurations of the engine beside each other: who measures when, and what is reported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks.engine import compare as module
from benchmarks.engine.__main__ import settings
from benchmarks.engine.compare import Comparison, Result, compare
from benchmarks.engine.steps import Cell, cells, timed


class FakeSide:
    """Takes 4 ms for a step where TERCET_NATIVE is 0, else 2; 1 more at every further turn."""

    turns: list[str] = []

    def __init__(self, model: str, dtype: str, variables: Mapping[str, str], *, cpu_time: bool) -> None:
        self.name = variables.get("TERCET_NATIVE", "default")
        self.threads = 2

    def measure(self, cell: Cell, seconds: float) -> list[float]:
        assert seconds == 0.5
        self.turns.append(self.name)
        return [(4.0 if self.name == "0" else 2.0) + self.turns.count(self.name) - 1]

    def close(self) -> None:
        self.turns.append(f"{self.name} closed")


def test_sides_take_turns_and_the_quickest_runs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Side", FakeSide)
    monkeypatch.setattr(FakeSide, "turns", [])
    asked = Comparison(
        models=["135M"], dtypes=["bfloat16"], cells=cells([8], prefill=False), ours={}, theirs={"TERCET_NATIVE": "0"},
        seconds=1.0, turns=2, cpu_time=False,
    )  # fmt: skip
    compare(asked, tmp_path / "new" / "engine.json")
    assert FakeSide.turns == ["default", "0", "0", "default", "default closed", "0 closed"]
    report = json.loads((tmp_path / "new" / "engine.json").read_text())
    assert report["theirs"] == {"TERCET_NATIVE": "0"}
    assert [(c["cell"], c["ours_ms"], c["theirs_ms"], c["ratio"]) for c in report["cells"]] == [
        ("decode 8", 2.0, 4.0, 2.0)
    ]


def test_a_busy_machine_shows_in_the_medians_only() -> None:
    result = Result.of("135M", "float32", "decode 1", [2.0, 2.0, 2.0], [3.0, 30.0, 40.0])
    assert (result.ratio, result.median_ratio) == (1.5, 15.0)


def test_cells() -> None:
    made = cells([1, 2], prefill=True)
    assert [c.label for c in made] == ["decode 1", "decode 2", "prefill 8x128", "prefill 2x512"]
    assert made[1] == Cell("decode 2", (1, 1), (128, 165))


def test_a_run_is_timed_as_often_as_asked_after_one_to_warm_up() -> None:
    ticks = iter(range(100))
    runs: Iterator[int] = iter(range(100))
    assert timed(lambda: next(runs), 0.0, lambda: next(ticks), least=2) == [1000, 1000]
    assert next(runs) == 3


def test_a_setting_without_a_value_is_refused() -> None:
    assert settings(["A=1", "B=x=y"]) == {"A": "1", "B": "x=y"}
    with pytest.raises(SystemExit, match="'TERCET_NATIVE' is no NAME=VALUE"):
        settings(["TERCET_NATIVE"])
