"""The first hour on a card, in parts of at most ten minutes: each is one command and leaves one JSON file. And the
first quarter of one, where there is no more: one command whose report is written after each of its stages.

The order is that in which a fault would make what follows worthless.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import report as table
from benchmarks.gpu.measuring.environment import ROOT
from benchmarks.gpu.running import Report, Run, run_stages

LIMIT_S = 560.0
OUTPUT_BYTES = 12_000
FOLDER = "first-hour"


@dataclass(frozen=True, slots=True)
class Part:
    """stages: of `benchmarks.gpu`; commands: others, each with what it sets in the environment."""

    what: str
    stages: tuple[str, ...] = ()
    commands: tuple[tuple[dict[str, str], tuple[str, ...]], ...] = ()


_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
_FAMILIES = "decode or prefill or norm or rope or matmul"
_SMALL = ("tests/kernels", "--device", "cuda", "-m", "not slow", "-k", _FAMILIES)
_SMOKE = (sys.executable, "-m", "benchmarks.gpu.child", "S10", os.devnull)


# In one command, what is fast first: the card, the demo model, the kernels' tests, speed, a server under load; graphs
# and equality in what time is left.
QUARTER = ("S0", "S13", "S14", "S15", "S16", "S2", "S3")
LAST_CERTAIN = "S16"


def _sanitized(tool: str) -> tuple[dict[str, str], tuple[str, ...]]:
    return {}, ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *_PYTEST, *_SMALL, "--maxfail", "1")


PARTS = (
    Part("probe and smoke, launches blocking and not", ("S0", "S10"), (({"CUDA_LAUNCH_BLOCKING": "1"}, _SMOKE),)),
    Part("compute-sanitizer over small kernels", commands=(_sanitized("memcheck"), _sanitized("racecheck"))),
    Part("the tests on the card", commands=(({}, (*_PYTEST, "tests/gpu", "-n", "8")),)),
    Part("kernels, graphs, equality, memory", ("S0", "S1", "S2", "S3", "S7")),
    Part("tiles of products", ("S0", "S12")),
    Part("the engine against the roofline", ("S0", "S4")),
    Part("the server while requests keep arriving", ("S0", "S11")),
    Part("waves, peers, ranks, faults", ("S0", "S5", "S6", "S8", "S9")),
    Part("a tiny model of every type", ("S0", "S17")),
)


def run_part(out: Path, number: int | None, run: Run, header: dict[str, Any], limit_s: float = LIMIT_S) -> int:
    """Run part `number` (from 1), or the first one without a file in `out`. 1 if something in it failed, else 0."""
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    if number is None:
        number = next((n for n in range(1, len(PARTS) + 1) if not (folder / f"{n}.json").exists()), None)
        if number is None:
            print(f"all {len(PARTS)} parts have left their files in {folder}")
            return 0
    part = PARTS[number - 1]
    print(f"part {number} of {len(PARTS)}: {part.what}", flush=True)
    ends = time.monotonic() + limit_s
    # Under another name until the part is over: a part that is cut off is run again.
    report = Report(folder / f"{number}.part", header, fresh=False)
    report.content["part"] = part.what
    ran = [_command(environ, command, ends) for environ, command in part.commands]
    report.content["commands"] = ran
    if part.stages:
        run_stages(part.stages, run, report, ends - time.monotonic())
        print(table.text(report))
    (folder / f"{number}.json").write_text(json.dumps(report.content, indent=1) + "\n")
    report.path.unlink(missing_ok=True)
    failed = [one for one in ran if one["status"] not in (0, None)]
    for one in failed:
        print(f"{' '.join(one['command'])}: status {one['status']}\n{one['output']}")
    counts = table.counts(report)
    print(f"written to {folder / f'{number}.json'}")
    return int(bool(failed or counts["failed"] or counts["unfinished"]))


def _command(environ: dict[str, str], command: tuple[str, ...], ends: float) -> dict[str, Any]:
    """status: None: the program is not there."""
    said: dict[str, Any] = {"command": [*command], "environ": environ}
    if shutil.which(command[0]) is None:
        return said | {"status": None, "output": f"{command[0]} is not installed"}
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    started = time.monotonic()
    try:
        ran = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | environ,
            timeout=max(5.0, ends - time.monotonic()),
        )  # fmt: skip
        status, output = ran.returncode, ran.stdout
    except subprocess.TimeoutExpired as expired:
        status, output = 124, expired.stdout or b""
    tail = output[-OUTPUT_BYTES:].decode(errors="replace")
    return said | {"status": status, "seconds": time.monotonic() - started, "output": tail}
