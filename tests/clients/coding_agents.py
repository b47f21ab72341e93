"""Coding agents from npm: their programs without network but the server, and `launcher launch`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

LIMIT_S = 400
Program = Callable[[Sequence[str], Path, Mapping[str, str]], "subprocess.CompletedProcess[str]"]


def path_of(name: str) -> str:
    """The program's file."""
    if shutil.which("node") is None:
        pytest.skip("no Node.js: apt-get install nodejs npm")
    path = shutil.which(name, path=str(Path(sys.prefix, "node_modules", ".bin")))
    assert path is not None
    return path


def program(name: str) -> Program:
    """What runs the program with arguments, in a folder, with these variables."""
    path = path_of(name)

    # opencode works where PWD says, whatever folder it is started in.
    def run(words: Sequence[str], folder: Path, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [path, *words], cwd=folder, env={**environ, "PWD": str(folder)}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip

    return run


def quiet_home(home: Path) -> dict[str, str]:
    """The variables of a user with this home, whose programs reach no other machine."""
    home.mkdir()
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("XDG_", "CODEX_", "CLAUDE", "ANTHROPIC_"))
    }
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    return kept | nowhere | {"HOME": str(home)}


def launched(client: str, url: str, environ: Mapping[str, str]) -> None:
    """Writes the client's settings with `launcher launch`."""
    words = [os.environ["TERCET_PYTHON"], "-m", "launcher", "launch", client, "--url", url, "--yes"]
    subprocess.run(words, env=environ, check=True, timeout=60)
