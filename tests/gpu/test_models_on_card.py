"""What the stand-in for a GPU tests of whole models (`tests/fake_card`), on a GPU: only results are compared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
STAND_IN = TESTS / "fake_card"
LIMIT_S = 900.0
FILES = ("test_families.py", "test_quantized.py", "test_features_served.py", "test_pooled.py", "test_demo_served.py")


@pytest.mark.parametrize("name", FILES)
def test_as_on_the_stand_in(name: str) -> None:
    paths = [Path(__file__).parent / "real_card", STAND_IN, TESTS.parent / "src", TESTS, TESTS.parent]
    own = os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(STAND_IN / "pytest.ini"), "-q", "--order", "late",
         "-o", "filterwarnings=default", str(STAND_IN / name)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [own])])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
