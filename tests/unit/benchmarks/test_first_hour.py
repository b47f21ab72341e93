"""The first hour on a card: the order of its parts, what each leaves, and requests that arrive at random."""

from __future__ import annotations

import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import first_hour
from benchmarks.gpu.first_hour import LAST_CERTAIN, LIMIT_S, PARTS, QUARTER, Part, run_part
from benchmarks.gpu.measuring.idle import busy_share
from benchmarks.gpu.running import Run
from benchmarks.gpu.stages.arrivals import device_work
from benchmarks.gpu.stages.table import BY_NAME
from benchmarks.gpu.subjects.arrivals import Spread, moments
from benchmarks.gpu.subjects.shapes import TOY
from benchmarks.gpu.subjects.synthetic import make_decoder

RUN = Run("cpu", tiny=True, model=None, seed=1)
HEADER: dict[str, Any] = {
    "git": "", "tree": "t", "python": "3", "versions": {}, "cpus": 1, "device": "cpu", "tiny": True, "model": None,
}  # fmt: skip


def test_every_stage_is_in_one_part_or_the_quarter() -> None:
    named = [stage for part in PARTS for stage in part.stages]
    assert set(named) | set(QUARTER) == set(BY_NAME)
    assert all(named.count(stage) == 1 for stage in named if stage != "S0")
    assert LIMIT_S < 600 < LIMIT_S + 60
    certain = QUARTER[: QUARTER.index(LAST_CERTAIN) + 1]
    assert sum(BY_NAME[stage].box_s for stage in certain) <= LIMIT_S


def test_parts_run_in_order_and_leave_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(first_hour, "run_stages", lambda names, run, report, budget: ran.append(names))
    monkeypatch.setattr(
        first_hour, "PARTS", (
            Part("one", ("S0",), (({"SAID": "yes"}, (sys.executable, "-c", "import os; print(os.environ['SAID'])")),)),
            Part("two", commands=(({}, (sys.executable, "-c", "raise SystemExit(3)")),)),
            Part("three", commands=(({}, ("no-such-program-here",)),)),
        ),
    )  # fmt: skip
    assert [run_part(tmp_path, None, RUN, HEADER) for _ in range(4)] == [0, 1, 0, 0]
    assert ran == [("S0",)]
    left = [json.loads((tmp_path / "first-hour" / f"{n}.json").read_text()) for n in (1, 2, 3)]
    assert [part["part"] for part in left] == ["one", "two", "three"]
    assert [part["commands"][0]["status"] for part in left] == [0, 3, None]
    assert left[0]["commands"][0]["output"] == "yes\n"
    assert run_part(tmp_path, 2, RUN, HEADER) == 1, "a part that is named runs again"
    assert sorted(p.name for p in (tmp_path / "first-hour").iterdir()) == ["1.json", "2.json", "3.json"]


def test_a_command_that_hangs_ends_with_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = (sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)")
    monkeypatch.setattr(first_hour, "PARTS", (Part("hangs", commands=(({}, waiting),)),))
    assert run_part(tmp_path, 1, RUN, HEADER, limit_s=0.0) == 1
    [command] = json.loads((tmp_path / "first-hour" / "1.json").read_text())["commands"]
    assert command["status"] == 124


def test_arrivals() -> None:
    source = random.Random(1)
    at = moments(4000, 20.0, source)
    assert at == sorted(at) and at[-1] == pytest.approx(200, rel=0.1)
    spread = Spread(32, 2048)
    lengths = [spread.draw(source) for _ in range(4000)]
    assert min(lengths) >= 32 and max(lengths) <= 2048
    assert statistics.fmean(lengths) == pytest.approx(spread.mean, rel=0.1)
    assert Spread(5, 5).mean == Spread(5, 5).draw(source) == 5


def test_what_a_trace_says_of_the_device() -> None:
    events = [
        {"cat": "cpu_op", "ts": 0, "dur": 100}, {"ph": "M"}, {"cat": "kernel", "ts": 10.0, "dur": 10},
        {"cat": "gpu_memcpy", "ts": 25, "dur": 5},
    ]  # fmt: skip
    spans = device_work({"traceEvents": events})
    assert spans == [(10.0, 20.0), (25.0, 30.0)]
    assert busy_share(spans) == 0.75
    assert device_work({}) == []


def test_shapes_are_measured_like_models_that_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from model_server.layers.linear.factory import LinearFactory

    measured: list[LinearFactory] = []
    monkeypatch.setattr(LinearFactory, "measure", lambda self, group: measured.append(self))
    make_decoder(TOY, torch.device("cpu"), torch.float32)
    assert len(measured) == 1


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the log of a server is left open
def test_server_against_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second server of ours in vLLM's place: it has the same route."""
    import torch

    from benchmarks.gpu.context import Context
    from benchmarks.gpu.measuring.roofline import Machine
    from benchmarks.gpu.stages import peers
    from benchmarks.gpu.subjects.models import of_shape
    from benchmarks.gpu.subjects.shapes import TOY_UNTIED

    def command(folder: Path, port: int) -> list[str]:
        address = ("--hostname", "127.0.0.1", "--port", str(port))
        return [sys.executable, "-m", "launcher", "--model-id", str(folder), *address]

    monkeypatch.setattr(peers, "_vllm_command", command)
    with (tmp_path / "lines").open("w") as lines:
        context = Context(torch.device("cpu"), True, 0.0, lines, Machine(1e11, 1e11, 1e-6, 2**31))
        peers._vllm(context, of_shape(context, TOY_UNTIED, "8B"), TOY_UNTIED)
        ends = [sys.executable, "-c", "raise SystemExit('no card')"]
        monkeypatch.setattr(peers, "_vllm_command", lambda folder, port: ends)
        peers._vllm(context, of_shape(context, TOY_UNTIED, "8B"), TOY_UNTIED)
    said = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    checks = {(line["name"], line["passed"]) for line in said if line["kind"] == "check"}
    assert ("Tercet, server: every request answered", True) in checks
    assert ("vLLM, server: every request answered", True) in checks
    assert ("vLLM, server", False) in checks and "no card" in said[-1]["detail"]
    assert any(line["name"].startswith("vLLM, server, 6 arrivals") and line["peer"] > 0 for line in said)
