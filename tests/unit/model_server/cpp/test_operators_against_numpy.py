"""Every library as it was installed, on random shapes: what a machine with fewer instructions would run, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import effort

from model_server.cpp.instruction_sets import SETS, module, path, survey

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[4]


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", SETS)
def test_it_computes_what_numpy_does(name: str, threads: int) -> None:
    found = survey()
    if name not in found.built or name not in found.supported:
        pytest.skip(f"{name} was not built, or this CPU does not have it")
    folders = ROOT / "src", ROOT / "tests", HERE
    command = HERE / "operator_cases.py", path(module(name)), threads, effort.examples(3, 100), threads
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr[-4000:]
