"""How kernels learn that they are interpreted, in any version of Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"

pytestmark = pytest.mark.interpreter  # needs no card

# Triton has `knobs` since 3.4 only: nothing may ask it.
ASK = """
import triton
vars(triton).pop("knobs", None)
from model_server.kernels import matmul, trial
from model_server.kernels.sampling import parts
print(trial.INTERPRETED)
"""


@pytest.mark.parametrize(("variable", "wanted"), [("1", "True"), ("0", "False")])
def test_the_interpreter_is_found_without_knobs(variable: str, wanted: str) -> None:
    paths = [str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {"TRITON_INTERPRET": variable, "PYTHONPATH": os.pathsep.join(paths)}
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=300, env=environ)
    assert asked.stdout.strip() == wanted, asked.stderr
