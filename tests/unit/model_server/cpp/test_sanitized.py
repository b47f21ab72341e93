"""The operators built with sanitizers, in processes of their own: no step beside their memory, nothing that C++ leaves
undefined, no race between threads, and what numpy computes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import effort
from support.cpp_builds import COMPILER, SOURCES, build, needs_compiler

from model_server.cpp import instruction_sets as sets

# A worker may wait for the compiler of another.
pytestmark = [needs_compiler, pytest.mark.timeout(1800)]
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[4]
CASES = HERE / "operator_cases.py"
MEMORY = "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
THREADS = "-O1", "-g1", "-fsanitize=thread"
# The operators for AMX on a machine without it: see tile_model.hpp.
MODELLED = "modelled amx"
EVERY_SET = [pytest.param(name, marks=pytest.mark.long) for name in (MODELLED, *sets.SETS) if name != "amx"]


def library(factory: pytest.TempPathFactory, name: str, sanitizer: tuple[str, ...]) -> Path:
    """The operators of a set that this machine can run, with a sanitizer."""
    base = "avx512_bf16" if name == MODELLED else name
    features = ctypes.CDLL(str(build(factory, SOURCES / "cpu_features.cpp", *sets.FEATURES_FLAGS)))
    if not features.cpu_supports(base.encode()):
        pytest.skip(f"this CPU has no {base}")
    model = ("-DTERCET_TILE_MODEL",) if name == MODELLED else ()
    return build(factory, SOURCES / "operators.cpp", *sets.flags(base), *sanitizer, *model)


def run(preloaded: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Python with a sanitizer's runtime, which must come before everything else."""
    runtime = subprocess.run([COMPILER, f"-print-file-name={preloaded}"], capture_output=True, text=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip(f"g++ has no {preloaded}")
    environment = os.environ | {
        "LD_PRELOAD": runtime,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests", HERE))),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps what it has until it ends
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    if "FATAL: ThreadSanitizer" in done.stderr:
        pytest.skip(f"this kernel's address space is not for {preloaded}")
    return done


def thread_runtime(factory: pytest.TempPathFactory) -> Path:
    return build(factory, HERE / "thread_runtime.cpp", *THREADS, "-fPIC", "-shared")


@pytest.mark.parametrize("name", EVERY_SET)
def test_nothing_is_read_beside_memory_or_undefined(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    made = library(tmp_path_factory, name, MEMORY)
    done = run("libasan.so", CASES, made, "2", str(effort.examples(6, 40)), "1")
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("name", [MODELLED, *(name for name in sets.SETS if name != "amx")])
def test_threads_do_not_race(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    made = library(tmp_path_factory, name, THREADS)
    rounds = str(effort.examples(3, 20))
    done = run("libtsan.so", CASES, made, "3", rounds, "1", thread_runtime(tmp_path_factory))
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.long
def test_a_race_is_seen(tmp_path_factory: pytest.TempPathFactory) -> None:
    done = run(
        "libtsan.so", "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1]).race()", thread_runtime(tmp_path_factory)
    )
    assert done.returncode != 0 and "data race" in done.stderr
