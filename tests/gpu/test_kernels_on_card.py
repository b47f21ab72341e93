"""The checks that `tests/kernels` makes in Triton's interpreter, on the card.

Each file in a process of its own: a fault on the device (an illegal address) stays with the process until it ends, and
would fail every test behind it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[1] / "kernels"
LIMIT_S = 900.0


@pytest.mark.parametrize("name", sorted(path.name for path in KERNELS.glob("test_*.py") if path.name != "test_aot.py"))
def test_as_in_the_interpreter(name: str) -> None:
    done = subprocess.run(
        # What else is installed beside a card may warn of itself: here that is no failure.
        [sys.executable, "-m", "pytest", "-q", "--device", "cuda", "-o", "addopts=-ra", "-o", "filterwarnings=default",
         str(KERNELS / name)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    # 5: nothing was collected, since all of the file is about the interpreter.
    assert done.returncode in (0, 5), done.stdout[-6000:] + done.stderr[-2000:]
