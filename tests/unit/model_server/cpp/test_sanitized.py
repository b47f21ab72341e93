"""The operators built with sanitizers, in processes of their own: no step beside their memory, nothing that C++ leaves
undefined, and what numpy computes. test_races.py has what threads share."""

from __future__ import annotations

import pytest
from support import effort
from support.cpp_builds import needs_compiler
from support.sanitizers import CASES, EVERY_SET, MODELLED, library, run

# A worker may wait for the compiler of another.
pytestmark = [needs_compiler, pytest.mark.timeout(1800), pytest.mark.weekly]
# Calls at each access instead of code: compiled in two thirds of the time. What an object's size would tell is known of
# all memory that is looked at.
MEMORY = (
    "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize=object-size", "-fno-sanitize-recover=all",
    "--param", "asan-instrumentation-with-call-threshold=0",
)  # fmt: skip


@pytest.mark.parametrize("name", EVERY_SET)
def test_nothing_is_read_beside_memory_or_undefined(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    made = library(tmp_path_factory, name, MEMORY)
    done = run("libasan.so", CASES, made, "2", str(effort.examples(6, 40)), "1")
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_step_beside_memory_is_seen(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = library(tmp_path_factory, MODELLED, MEMORY)
    code = (
        "import sys; import numpy as np; from pathlib import Path\n"
        "from support.cpp_operators import Operators, address, exact\n"
        "x, out = exact(np.ones(17, np.float32)), exact(np.ones(18, np.float32))\n"
        "Operators(Path(sys.argv[1]), 1).cpp_silu_gated(0, address(x), address(out), 1, 9)\n"
    )
    done = run("libasan.so", "-c", code, made)
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr
