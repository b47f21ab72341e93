"""An environment for each library that quantizes models, kept as long as what it is made of stays the same."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORK = ROOT / "build" / "quantizers"
INSTALL_LIMIT_S = 1800.0

_UNREACHABLE = re.compile(
    r"NewConnectionError|Failed to establish a new connection|Name or service not known|name resolution"
    r"|Max retries exceeded|ConnectTimeout|ReadTimeout|Read timed out|ProxyError|ConnectionResetError"
    r"|RemoteDisconnected|HTTP error [45]\d\d|\b[45]\d\d (Client|Server) Error"
)
_ABSENT = "(from versions: none)"
"""pip's words for a package of which it finds no file at all. A package without the wanted version is a wrong list."""


class UnavailableError(Exception):
    """The package index cannot be reached, or does not have a package."""


class BrokenError(Exception):
    """An environment could not be made for another reason."""


@dataclass(frozen=True)
class Environment:
    """`packages` is the file that says what is in it; it also sees what is in `shared`."""

    name: str
    packages: Path
    shared: Environment | None = None

    @property
    def key(self) -> str:
        parts = [sys.version.encode(), self.packages.read_bytes(), self.shared.key.encode() if self.shared else b""]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]

    @property
    def folder(self) -> Path:
        return WORK / f"{self.name}-{self.key}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"


TORCH = Environment("torch", ROOT / "constraints.txt")


def of_library(library: str) -> Environment:
    return Environment(library, HERE / "requirements" / f"{library}.txt", TORCH)


Run = Callable[[Sequence[str]], str]
"""Runs a command and returns what it says of its failure; empty: there was none."""


def said(command: Sequence[str]) -> str:
    try:
        status, errors = bounded(command, INSTALL_LIMIT_S, stderr=subprocess.PIPE)
    except subprocess.TimeoutExpired:
        return f"nothing came of {' '.join(command[:3])} in {INSTALL_LIMIT_S:.0f} s"
    except OSError as error:
        return str(error)
    return "" if status == 0 else errors.strip() or f"{command[0]} ended with {status}"


def bounded(command: Sequence[str], limit_s: float, **options: Any) -> tuple[int, str]:
    """Runs a command; returns its status and errors. Past the limit it ends with all that it has started."""
    with subprocess.Popen(command, start_new_session=True, text=True, errors="replace", **options) as process:
        try:
            _, errors = process.communicate(timeout=limit_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, errors or ""


def made(environment: Environment, run: Run = said) -> Path:
    """The interpreter of an environment and of what it shares. Raises UnavailableError and BrokenError."""
    if environment.shared is not None:
        made(environment.shared, run)
    mark = environment.folder / ".installed"
    if not (mark.is_file() and environment.python.exists()):
        _make(environment, run)
        mark.touch()
        for other in {WORK / environment.name, *WORK.glob(f"{environment.name}-*")} - {environment.folder}:
            shutil.rmtree(other, ignore_errors=True)
    return environment.python


def _make(environment: Environment, run: Run) -> None:
    if failure := run([sys.executable, "-m", "venv", "--clear", str(environment.folder)]):
        raise BrokenError(f"no environment: {_last_line(failure)}")
    python = str(environment.python)
    if environment.shared is None:
        command = [python, str(ROOT / "environment" / "install_torch.py"), "--build", "cpu"]
    else:
        (environment.site_packages / "shared.pth").write_text(f"{environment.shared.site_packages}\n")
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command = [*pip, "--no-deps", "-r", str(environment.packages)]
    if failure := run(command):
        if reason := reason_to_skip(failure):
            raise UnavailableError(reason)
        raise BrokenError(f"{environment.name} is not installed: {_last_line(failure)}")


def reason_to_skip(failure: str) -> str:
    """The line of pip's that says that the index cannot be reached or lacks a package; empty: something else failed."""
    lines = failure.splitlines()
    return next((line for line in lines if _UNREACHABLE.search(line) or _ABSENT in line), "")


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]
