"""Starts the stages, each within its time, and keeps what they said in one JSON file.

A stage that fails, hangs or loses its device does not stop the next one. Knows nothing of what a stage measures.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.measuring.environment import ROOT
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.record import Line, from_json
from benchmarks.gpu.stages.table import BY_NAME, Stage

# A stage that has not ended this long after its time is asked to, then killed.
GRACE_S = 8.0
STOP_S = 10.0
# No stage is started with less.
LEAST_S = 5.0
LOG_BYTES = 4000
MOST_PARTS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Run:
    """What all stages of one command share."""

    device: str
    tiny: bool
    model: Path | None
    seed: int | None


class Report:
    """The JSON file: `header`, `machine` (what S0 measured) and `stages`. Written again after every stage."""

    def __init__(self, path: Path, header: dict[str, Any], *, fresh: bool) -> None:
        """What an earlier run of the same code on the same device in the same mode finished is kept, unless `fresh`."""
        self.path = path
        self.content: dict[str, Any] = {"header": header, "machine": None, "stages": {}}
        if not fresh and path.exists():
            earlier = json.loads(path.read_text())
            if all(earlier["header"].get(k) == header.get(k) for k in ("tree", "device", "card", "tiny", "model")):
                self.content = earlier | {"header": header}

    @property
    def machine(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.content["machine"]
        return found

    def is_finished(self, stage: str) -> bool:
        return bool(self.content["stages"].get(stage, {}).get("state") == "finished")

    def lines(self, stage: str) -> list[Line]:
        return [from_json(fields) for fields in self.content["stages"].get(stage, {}).get("lines", [])]

    def put(self, stage: str, result: dict[str, Any]) -> None:
        self.content["stages"][stage] = result
        machine = [line.detail for line in self.lines(stage) if line.name == MACHINE]
        if machine:
            self.content["machine"] = json.loads(machine[-1])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".tmp")
        partial.write_text(json.dumps(self.content, indent=1) + "\n")
        partial.replace(self.path)


# The note in which S0 says what the later stages are measured against.
MACHINE = "machine"


def run_stages(names: Sequence[str], run: Run, report: Report, budget_s: float) -> None:
    """Run what is not finished, in order, S0 first where its figures are missing."""
    ends = time.monotonic() + budget_s
    wanted = [*names] if report.machine is not None or "S0" in names else ["S0", *names]
    for name in wanted:
        stage = BY_NAME[name]
        if report.is_finished(name):
            print(f"{name}: kept from an earlier run", flush=True)
            continue
        box_s = min(stage.box_s, ends - time.monotonic() - GRACE_S)
        if box_s < LEAST_S:
            report.put(name, {"state": "not started", "why": "the budget is used up", "lines": []})
            continue
        print(f"{name}: {stage.what} (at most {box_s:.0f} s)", flush=True)
        result = _run_stage(stage, run, report.machine, box_s, report.path.parent / "lines" / name)
        print(f"{name}: {result['state']} after {result['seconds']:.1f} s", flush=True)
        report.put(name, result)


def _run_stage(stage: Stage, run: Run, machine: dict[str, Any] | None, box_s: float, folder: Path) -> dict[str, Any]:
    """All parts of a stage at once: those that have any do not measure time. folder: what they write as they run, for a
    command that is cut off."""
    parts: tuple[str | None, ...] = PARTS.get(stage.name, (None,))
    started = time.monotonic()
    at_once = min(len(parts), MOST_PARTS_AT_ONCE, max(1, len(os.sched_getaffinity(0)) // 2))
    rounds = -(-len(parts) // at_once)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with ThreadPoolExecutor(at_once) as pool:
        jobs = [
            pool.submit(_run_part, stage, part, run, machine, box_s / rounds, folder / f"part-{i}")
            for i, part in enumerate(parts)
        ]
        results = [job.result() for job in jobs]
    states = [r["state"] for r in results]
    worst = next((s for s in ("ran out of time", "failed") if s in states), "finished")
    merged = {
        "state": worst,
        "seconds": time.monotonic() - started,
        "lines": [line for r in results for line in r["lines"]],
    }
    logs = [r["log"] for r in results if r["state"] != "finished"]
    return merged | ({"log": "\n".join(logs)} if logs else {})


def _run_part(
    stage: Stage, part: str | None, run: Run, machine: dict[str, Any] | None, box_s: float, place: Path
) -> dict[str, Any]:
    lines, log = place.with_suffix(".jsonl"), place.with_suffix(".log")
    lines.touch()
    command = [sys.executable, "-m", "benchmarks.gpu.child", stage.name, str(lines), "--device", run.device]
    command += ["--box", f"{box_s:.1f}", *(["--tiny"] if run.tiny else [])]
    for option, value in (
        ("--part", part), ("--model", run.model), ("--seed", run.seed),
        ("--machine", None if machine is None else json.dumps(machine)),
    ):  # fmt: skip
        command += [] if value is None else [option, str(value)]
    # With src first: a bare machine has the tree, not an installed package.
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environ, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        in_time = _wait(child, box_s + GRACE_S)
    state = "ran out of time" if not in_time else "finished" if child.returncode == 0 else "failed"
    said = [json.loads(line) for line in lines.read_text().splitlines() if line.endswith("}")]
    if state != "finished":
        said.append(Line("check", f"{part or stage.name} {state}", passed=False).to_json())
    tail = log.read_bytes()[-LOG_BYTES:].decode(errors="replace")
    return {"state": state, "lines": said, "log": tail}


def _wait(child: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Whether the child ended by itself; in any case nothing of its group is left."""
    try:
        child.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_S)
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
