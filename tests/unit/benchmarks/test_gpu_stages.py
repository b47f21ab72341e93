"""The stages for a GPU at toy sizes on a CPU: that they run, and what becomes of one that fails or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import report as table
from benchmarks.gpu import running
from benchmarks.gpu.context import Context
from benchmarks.gpu.measuring.idle import Ran, busy_share, by_time
from benchmarks.gpu.measuring.roofline import Machine
from benchmarks.gpu.record import Line, Target, from_json
from benchmarks.gpu.running import Report, Run, run_stages
from benchmarks.gpu.stages import faults, quick_speed, speed
from benchmarks.gpu.stages.table import STAGES, Stage
from benchmarks.gpu.subjects.models import Subject, subjects

ROOT = Path(__file__).parents[3]
MACHINE = {"bandwidth": 1e11, "flops": 1e11, "gap_s": 1e-6, "memory": 2**31}
HEADER = {
    "git": "", "tree": "t", "python": "3", "versions": {}, "cpus": 1, "device": "cpu", "tiny": True, "model": None,
}  # fmt: skip
# Half a minute and more each.
WEEKLY = partial(pytest.param, marks=pytest.mark.weekly)
LONG = partial(pytest.param, marks=pytest.mark.long)
TOYS = Run("cpu", tiny=True, model=None, seed=1)


def run_child(tmp_path: Path, stage: str, *arguments: str) -> list[dict[str, Any]]:
    lines = tmp_path / "lines.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu.child", stage, str(lines), "--device", "cpu", "--tiny"]
    ran = subprocess.run(
        [*command, "--box", "200", "--machine", json.dumps(MACHINE), "--seed", "3", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in lines.read_text().splitlines()]


@pytest.mark.parametrize(
    "stage",
    [
        WEEKLY("S2"),
        WEEKLY("S3"),
        LONG("S4"),
        WEEKLY("S7"),
        WEEKLY("S8"),
        WEEKLY("S10"),
        WEEKLY("S12"),
        "S15",
        WEEKLY("S17"),
    ],
)
def test_a_stage_runs(tmp_path: Path, stage: str) -> None:
    said = run_child(tmp_path, stage)
    assert said
    assert [line for line in said if line.get("passed") is False] == []


@pytest.mark.parity
def test_an_assertion_on_the_device_is_tried(tmp_path: Path) -> None:
    with (tmp_path / "lines").open("w") as lines:
        faults._device_assert(Context(torch.device("cpu"), tiny=True, deadline=1e9, lines=lines))
    assert '"passed": true' in (tmp_path / "lines").read_text()


@pytest.mark.parametrize("part", [LONG("sampling"), *(WEEKLY(p) for p in running.PARTS["S1"] if p != "sampling")])
def test_a_kernel_family_is_compared(tmp_path: Path, part: str) -> None:
    said = run_child(tmp_path, "S1", "--part", part)
    assert said
    assert [line for line in said if line.get("passed") is False] == []


@pytest.mark.weekly
def test_the_users_model_is_measured(tmp_path: Path) -> None:
    from wire import demo_model

    said = run_child(tmp_path, "S4", "--model", str(demo_model.path()))
    figures = [line for line in said if line["kind"] == "figure"]
    assert figures and all(line["ratio"] > 0 and "target" not in line for line in figures)


@pytest.mark.weekly
def test_one_table_and_one_json(tmp_path: Path) -> None:
    """S0 is run first by itself; what is finished is kept."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--stages", "S7"]
    command += ["--budget", "250", "--out", str(tmp_path)]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert first.returncode == 0, first.stdout + first.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert {name: stage["state"] for name, stage in report["stages"].items()} == {"S0": "finished", "S7": "finished"}
    assert report["machine"]["bandwidth"] > 0
    assert {"git", "tree", "versions", "device"} <= report["header"].keys()
    assert "copy bandwidth" in (tmp_path / "table.txt").read_text()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert "S7: kept from an earlier run" in again.stdout


def test_graphs_are_made_for_the_longest_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that is longer switches them off for all cells behind it."""

    class Enough(Exception):
        """The stage has said what it wants."""

    asked: list[int] = []

    def driver(self: Subject, context: Context, tokens: int, sizes: tuple[int, ...], longest: int) -> Any:
        asked.append(longest)
        raise Enough

    monkeypatch.setattr(Subject, "driver", driver)
    with (tmp_path / "lines").open("w") as lines:
        context = Context(torch.device("cpu"), False, float("inf"), lines, Machine(1e11, 1e11, 1e-6, 2**31))
        [subject, *_] = subjects(context)
        with pytest.raises(Enough):
            speed._measure(context, subject)
        with pytest.raises(Enough):
            quick_speed.run(context)
    assert asked[0] > max(map(max, speed.PREFILL.values())) and asked[1] > max(quick_speed.PREFILL)


def test_failing_tests_are_written_at_once(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text("def test_a():\n    assert False, 'wrong sum'\n\ndef test_b():\n    pass\n")
    (tmp_path / "test_none.py").write_text("import no_such_module\n")
    files = {"FAILING_TESTS_LINES": str(tmp_path / "lines"), "FAILING_TESTS_DONE": str(tmp_path / "done")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.failing_tests", "-p", "no:cacheprovider"]
    subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir", str(tmp_path), "--continue-on-collection-errors", str(tmp_path)],
        cwd=ROOT, env=os.environ | files, capture_output=True, timeout=100,
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [(line["name"], line["passed"]) for line in lines] == [
        ("test_none.py", False),
        ("test_two.py::test_a", False),
    ]
    assert "no_such_module" in lines[0]["detail"] and "wrong sum" in lines[1]["detail"]
    assert (tmp_path / "done").read_text() == "failed test_two.py::test_a\npassed test_two.py::test_b\n"


def make_report(tmp_path: Path) -> Report:
    report = Report(tmp_path / "report.json", HEADER, fresh=True)
    report.content["machine"] = MACHINE
    return report


def use_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> None:
    """Stage S4 does what `source` says."""
    (tmp_path / "stage.py").write_text(source)
    command = [sys.executable, str(tmp_path / "stage.py")]
    real = subprocess.Popen

    def start(given: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return real([*command, given[4]], **options)

    monkeypatch.setattr(running.subprocess, "Popen", start)


def test_a_stage_that_dies_keeps_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = (
        "import os, sys\n"
        "with open(sys.argv[1], 'a') as lines:\n"
        """    lines.write('{"kind": "figure", "name": "a", "value": 1.0, "unit": "s"}\\n{"kind": "fig')\n"""
        "print('last words', flush=True)\n"
        "os.abort()\n"
    )
    use_module(monkeypatch, tmp_path, source)
    report = make_report(tmp_path)
    run_stages(["S4"], TOYS, report, 60)
    stage = report.content["stages"]["S4"]
    assert stage["state"] == "failed" and "last words" in stage["log"]
    assert [line.name for line in report.lines("S4")] == ["a", "S4 failed"]
    assert table.counts(report) == {"failed": 1, "missed": 0, "unfinished": ["S4"]}
    assert not Report(report.path, HEADER, fresh=False).is_finished("S4")


def test_a_stage_that_hangs_is_ended_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(running, "GRACE_S", 0.2)
    monkeypatch.setattr(running, "STOP_S", 0.2)
    monkeypatch.setattr(running, "LEAST_S", 0.1)
    short = {s.name: Stage(s.name, s.what, s.module, 0.3) for s in STAGES}
    monkeypatch.setattr(running, "BY_NAME", short)
    use_module(monkeypatch, tmp_path, "import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(100)\n")
    report = make_report(tmp_path)
    run_stages(["S4", "S7"], TOYS, report, 60)
    assert [report.content["stages"][name]["state"] for name in ("S4", "S7")] == ["ran out of time"] * 2


def test_a_stage_without_budget_is_not_started(tmp_path: Path) -> None:
    report = make_report(tmp_path)
    run_stages(["S4"], TOYS, report, 1)
    assert report.content["stages"]["S4"]["state"] == "not started"
    assert "the budget is used up" in table.text(report)


def test_another_tree_starts_afresh(tmp_path: Path) -> None:
    report = make_report(tmp_path)
    report.put("S4", {"state": "finished", "seconds": 1.0, "lines": []})
    assert Report(report.path, HEADER, fresh=False).is_finished("S4")
    assert not Report(report.path, HEADER, fresh=True).is_finished("S4")
    assert not Report(report.path, HEADER | {"tree": "u"}, fresh=False).is_finished("S4")


@pytest.mark.parametrize(
    ("target", "line", "verdict"),
    [
        (Target(0.8, 0.9), Line("figure", "a", 1.0, "s", ratio=0.85), "must met"),
        (Target(0.8, 0.9), Line("figure", "a", 1.0, "s", ratio=0.95), "aim met"),
        (Target(0.8, 0.9), Line("figure", "a", 1.0, "s", ratio=0.5), "not met"),
        (Target(0.04, 0.01, on="value", at_least=False), Line("figure", "a", 0.02, "share"), "must met"),
        (Target(1.5, 2.5, on="peer"), Line("figure", "a", 1.0, "tok/s", peer=1.4), "not met"),
        (Target(1.5, 2.5, on="peer"), Line("figure", "a", 1.0, "tok/s"), ""),
    ],
    ids=["must", "aim", "missed", "small", "peer", "nothing"],
)
def test_bars(target: Target, line: Line, verdict: str) -> None:
    line.target = target
    assert line.verdict == verdict
    assert from_json(json.loads(json.dumps(line.to_json()))) == line


def test_idle_time() -> None:
    assert busy_share([(0, 2), (1, 3), (5, 6)]) == pytest.approx(4 / 6)
    assert busy_share([(0, 10), (2, 3)]) == 1.0
    assert busy_share([]) == 0.0


def test_kernels_by_time() -> None:
    ran = [Ran("void norm<float>(int)", 0, 2), Ran("gemm", 2, 9), Ran("void norm<float>(int)", 10, 12)]
    assert by_time(ran, 2) == "5.5 us in 1.5 kernels; 3.5 us, 0.5x gemm; 2.0 us, 1x norm"
