"""A process of its own for files that strangers wrote: without this one's secrets, and gone when this one is gone."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from model_server.errors import StartupError

# What the child needs of the environment; tokens and keys stay here.
_PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR", "VIRTUAL_ENV")
_MOST_CHARACTERS = 500
_PDEATHSIG = 1  # <sys/prctl.h>


def run(
    module: str,
    source: Path,
    target: Path,
    *,
    subject: str,
    passed_on: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """`python -P -m module source target`, waited for.

    passed_on: variables that this child needs as well. environment: variables that are set for it.

    Raises StartupError, one line, with the child's own last one if it ends otherwise than with 0. subject: what was to
    be converted, as the beginning of a sentence.
    """
    inherited = {name: os.environ[name] for name in (*_PASSED_ON, *passed_on) if name in os.environ}
    ended = subprocess.run(
        [sys.executable, "-P", "-m", module, str(source), str(target)],
        env=inherited | dict(environment or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if ended.returncode == 0:
        return
    if ended.returncode < 0:
        raise StartupError(f"{subject}: the conversion was ended by signal {-ended.returncode} (out of memory?)")
    lines = ended.stdout.strip().splitlines() or ended.stderr.strip().splitlines()
    raise StartupError(lines[-1][:_MOST_CHARACTERS] if lines else f"{subject}: the conversion failed")


def die_with_parent() -> None:
    """For the child: it is killed when its parent ends in any way."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
