"""The operators built with ThreadSanitizer, in processes of their own: no race between threads.

A file of its own beside test_sanitized.py, so that the two, which take minutes each, run in two processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import effort
from support.cpp_builds import build, needs_compiler
from support.sanitizers import CASES, EVERY_SET, library, run

# A worker may wait for the compiler of another.
pytestmark = [needs_compiler, pytest.mark.timeout(1800), pytest.mark.weekly]
THREADS = "-O1", "-g1", "-fsanitize=thread"


def thread_runtime(factory: pytest.TempPathFactory) -> Path:
    return build(factory, Path(__file__).with_name("thread_runtime.cpp"), *THREADS, "-fPIC", "-shared")


@pytest.mark.parametrize("name", EVERY_SET)
def test_threads_do_not_race(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    made = library(tmp_path_factory, name, THREADS)
    rounds = str(effort.examples(3, 20))
    done = run("libtsan.so", CASES, made, "3", rounds, "1", thread_runtime(tmp_path_factory))
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_race_is_seen(tmp_path_factory: pytest.TempPathFactory) -> None:
    done = run(
        "libtsan.so", "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1]).race()", thread_runtime(tmp_path_factory)
    )
    assert done.returncode != 0 and "data race" in done.stderr
