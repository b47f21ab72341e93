"""The operators built with sanitizers, and Python with a sanitizer's runtime."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cpp_builds import COMPILER, SOURCES, build

from model_server.cpp import instruction_sets as sets

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "unit" / "model_server" / "cpp" / "operator_cases.py"
# The operators for AMX on a machine without it: see tile_model.hpp.
MODELLED = "modelled amx"
EVERY_SET = [MODELLED, *(name for name in sets.SETS if name != "amx")]


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
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests", CASES.parent))),
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
