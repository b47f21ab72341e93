"""How our processes start Python children: nothing is imported from their folder, which may be a model's with a
`types.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

NEUTRAL_FOLDER = "/"
"""Where a child works that is given no relative path."""


def module_command(module: str) -> tuple[str, ...]:
    """Return `python -m module` of this interpreter, without the working folder on its path."""
    return (sys.executable, "-P", "-m", module)


def script_command(script: Path) -> tuple[str, ...]:
    """A script that needs only the standard library: without installed packages, and without the user's variables."""
    return (sys.executable, "-I", "-S", str(script))


def child_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return `environ` for a Python child in any folder, so that its children import nothing from theirs, either."""
    # The entries of PYTHONPATH stay the folders that they are here; an empty entry, which would be the working folder,
    # goes.
    env = {**(os.environ if environ is None else environ), "PYTHONSAFEPATH": "1"}
    if "PYTHONPATH" in env:
        entries = filter(None, env["PYTHONPATH"].split(os.pathsep))
        env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, entries))
    return env
