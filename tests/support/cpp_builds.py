"""C++ that tests compile themselves, once for all workers of a test run."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

import model_server.cpp

SOURCES = Path(model_server.cpp.__file__).parent / "source"
COMPILER = shutil.which("g++") or ""
needs_compiler = pytest.mark.skipif(
    not COMPILER or platform.machine() != "x86_64", reason="needs g++ on x86-64"
)  # fmt: skip


def build(factory: pytest.TempPathFactory, source: Path, *flags: str) -> Path:
    """The file that g++ makes of `source` with `flags`; headers may be those of the operators."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    name = hashlib.sha256(repr((source, flags)).encode()).hexdigest()[:16]
    made = folder / f"{source.stem}-{name}"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            command = [COMPILER, "-std=c++17", f"-I{SOURCES}", *flags, str(source), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=800)
            assert done.returncode == 0, done.stderr
    return made
