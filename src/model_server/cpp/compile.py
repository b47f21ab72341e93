"""From our C++ sources to a shared library for this very CPU, kept in a cache folder of the user.

The name of the library holds a hash of the sources, the flags and the CPU's features, then one of the compiler, so that
a change of any of them compiles anew. Where no compiler is installed, a library that was made ahead by any will do.

The folder is private to the user: what is loaded from it runs with the server's rights.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from model_server.cpp.config import user_cache

SOURCES = Path(__file__).parent / "source"
MAIN = "operators.cpp"
# Loops are written in vectors already, so that the compiler's own vectorizer would only cost time. No fast-math: NaN
# must stay NaN, it tells of rows that failed.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-tree-vectorize")
LINKING = ("-fPIC", "-shared", "-w")
COMPILERS = ("g++", "c++")
COMPILE_LIMIT_S = 120.0
_CPU_INFO = Path("/proc/cpuinfo")


class CompileError(Exception):
    """No library can be had; the text says why, in one line."""


def compiled(cache: Path | None = None) -> Path:
    """The library for this machine, compiled if it is not there yet: some seconds, once.

    cache: a folder instead of the user's own. Processes that come at the same time wait for the first.
    Raises CompileError.
    """
    compiler = _compiler()
    folder = _private(cache or _user_cache())
    key = _key()
    if compiler is None:
        return _made_ahead(folder, key)
    library = folder / f"operators-{key}-{_hash(_version(compiler))}.so"
    if library.exists():
        return library
    try:
        with open(folder / "compile.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(compiler, library)
    except OSError as error:
        raise CompileError(f"{folder} cannot be written ({error})") from error
    return library


def _made_ahead(folder: Path, key: str) -> Path:
    """The library that a compiler made before it was taken away, the newest of several. Raises CompileError."""
    found = sorted(folder.glob(f"operators-{key}-*.so"), key=lambda path: path.stat().st_mtime_ns)
    if not found:
        raise CompileError(f"no C++ compiler is installed (looked for {', '.join(COMPILERS)})")
    return found[-1]


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _version(compiler: str) -> str:
    return "".join(_run([compiler, "--version"]).splitlines()[:1])


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _user_cache() -> Path:
    try:
        return user_cache()
    except RuntimeError as error:
        raise CompileError(f"no folder to compile into ({error}); set HOME or XDG_CACHE_HOME") from error


def _private(folder: Path) -> Path:
    """The folder, made if need be. Raises CompileError where another user could put a library into it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except (OSError, RuntimeError) as error:
        raise CompileError(f"the cache folder cannot be used ({error})") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise CompileError(f"{folder} must be a folder of this user that nobody else can write to")
    return folder


def _key() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((FLAGS, LINKING, platform.machine(), _cpu_features() or platform.node())).encode())
    return digest.hexdigest()[:32]


def _cpu_features() -> str:
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _compile(compiler: str, library: Path) -> None:
    """Written beside its place and moved there when it is whole."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / "made.so"
        _run([compiler, *FLAGS, *LINKING, str(SOURCES / MAIN), "-o", str(made)])
        os.replace(made, library)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]} failed: {error}") from error
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), f"exit status {done.returncode}")
        raise CompileError(f"{command[0]} failed: {first}")
    return done.stdout
