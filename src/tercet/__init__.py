"""The installed commands. A module that Python would import instead of one of our packages is named, not run.

Our packages have names that others use too. This one imports none before it has seen where each would come from.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

_HOME = Path(__file__).parent.parent
_PACKAGES = ("wire", "launcher", "router", "model_server")


def launcher() -> int:
    return _run("launcher")


def router() -> int:
    return _run("router")


def model_server() -> int:
    return _run("model_server")


def _run(package: str) -> int:
    """Returns the exit status."""
    for name in _PACKAGES:
        found = _intruder(name, sys.path if name in ("wire", package) else _path_of_children())
        if found is not None:
            sys.stderr.write(
                f"Error: {str(found)!r} would be imported instead of Tercet's own {name!r}: rename it, or take its "
                "folder off the import path (PYTHONPATH, *.pth files)\n"
            )
            return 1
    try:
        status: int = importlib.import_module(f"{package}.cli").main()
    except KeyboardInterrupt:  # before the command handles it: a second of imports
        return 130
    return status


def _path_of_children() -> Sequence[str]:
    """They are started with `-P`: without the first entry, the folder of the script or the working folder."""
    return sys.path if sys.flags.safe_path else sys.path[1:]


def _intruder(name: str, path: Sequence[str]) -> Path | None:
    """Where this package would be imported from, unless it is ours."""
    spec = PathFinder.find_spec(name, path)
    if spec is None:  # Ours, by the finder of an editable installation.
        return None
    folder = next(iter(spec.submodule_search_locations or ()), None)
    # Resolved: the import path may name our folder twice, once by a link.
    if folder is not None and Path(folder).resolve() == (_HOME / name).resolve():
        return None
    return Path(spec.origin or folder or name)
