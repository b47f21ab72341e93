"""A process for untrusted files, without secrets, ending with this one."""

from __future__ import annotations

import ctypes
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from model_server.errors import StartupError
from wire.processes.python_child import NEUTRAL_FOLDER, child_environment, module_command

# What the child needs of the environment; tokens and keys stay here.
_PASSED_ON = ("PATH", "PYTHONPATH", "PYTHONSAFEPATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR", "VIRTUAL_ENV")
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
    """Wait for `python -P -m module source target`.

    Args:
        subject: What is converted, to begin a sentence.
        passed_on: Variables that it needs.
        environment: Variables set for it.

    Raises:
        StartupError: It ended otherwise than with 0; its last line.
    """
    names = {*_PASSED_ON, *passed_on}
    inherited = {name: value for name, value in child_environment().items() if name in names}
    ended = subprocess.run(
        [*module_command(module), str(source.absolute()), str(target.absolute())],
        env=inherited | dict(environment or {}),
        cwd=NEUTRAL_FOLDER,
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
    """End this child when its parent ends."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
