"""The libraries of C++ operators by instruction set: how setup.py compiles them, and which one runs. Needs no torch."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
_AGAIN = "Tercet again (in a checkout: make operators)"

_AVX512_BF16 = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
# The compiler's flags of each set, the best set first; cpu_features.cpp asks the CPU for the same.
SETS = {
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512_bf16": _AVX512_BF16,
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
}
# Loops are written in vectors already, so that the compiler's own vectorizer would only cost time. No fast-math: NaN
# must stay NaN, which marks rows that failed. Tuned for Haswell: on AMD's Zen 4 products are as quick as those that are
# tuned for it, or up to 2 % faster; with GCC's generic tuning they are up to 3 % slower. No unique symbols: two
# libraries in a process would share their scratch.
_FLAGS = (
    "-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fno-tree-vectorize", "-fno-gnu-unique",
    "-mtune=haswell", "-fPIC", "-shared", "-w",
)  # fmt: skip
# The library that asks the CPU, compiled for any x86-64.
FEATURES = "cpu_features"
FEATURES_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared")


def is_served() -> bool:
    """Whether operators can be built for such machines."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def module(name: str) -> str:
    return f"operators_{name}"


def path(library: str, folder: Path = FOLDER) -> Path:
    return folder / f"{library}.so"


def flags(name: str, folder: Path = FOLDER) -> tuple[str, ...]:
    """Return the compiler's flags for a set."""
    return (*_FLAGS, *SETS[name], f"-DTERCET_SOURCES={_sources_hash(name, folder)}L")


def _sources_hash(name: str, folder: Path) -> int:
    """Hash all that a library is made from, to 63 bits."""
    digest = hashlib.sha256(repr((_FLAGS, SETS[name])).encode())
    for source in sorted((folder / "source").glob("*.[ch]pp")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return int.from_bytes(digest.digest()[:8]) >> 1


@dataclass(frozen=True)
class Survey:
    """Sets, the best first: built, supported by this CPU, chosen."""

    built: tuple[str, ...]
    supported: tuple[str, ...]
    chosen: str | None
    # Why better ones cannot be used, a line each.
    faults: tuple[str, ...]

    def lack(self) -> str | None:
        """Say why no operators can be used and what to do, if so."""
        if self.chosen is not None:
            return None
        if self.faults:
            return "; ".join(self.faults)
        if not is_served():
            return f"they are for Linux on x86-64, this is {sys.platform} on {platform.machine()}"
        if not self.built:
            return f"none were built: install g++ (11 or newer) and then {_AGAIN}"
        if not self.supported:
            return f"this CPU has none of {', '.join(SETS)}"
        return f"built for {', '.join(self.built)}, usable here are {', '.join(self.supported)}: install {_AGAIN}"


def survey(cap: str | None = None, folder: Path = FOLDER) -> Survey:
    """Find the best set up to `cap` that is built, supported, and agrees to run."""
    built = tuple(name for name in SETS if path(module(name), folder).exists())
    chosen, faults, stale = None, [], []
    has: tuple[str, ...] = ()
    try:
        has = supported(folder)
    except OSError as error:
        if built:
            faults.append(f"the CPU's features cannot be read ({error})")
    for name in candidates(built, has, cap):
        try:
            operators = ctypes.CDLL(str(path(module(name), folder)))
        except OSError as error:
            faults.append(f"{name} cannot be loaded ({error})")
            continue
        if _is_stale(name, operators, folder):
            stale.append(name)
        elif operators.cpp_prepare() != 0:
            faults.append(f"the kernel does not let this process use {name}")
        else:
            chosen = name
            break
    if stale:
        faults.append(f"built from other sources than those beside them: {', '.join(stale)}; run `make operators`")
    return Survey(built, has, chosen, tuple(faults))


def candidates(built: Collection[str], supported: Collection[str], cap: str | None) -> list[str]:
    """List usable sets, the best first."""
    names = list(SETS)
    allowed = names if cap is None else names[names.index(cap) :]
    return [name for name in allowed if name in built and name in supported]


def supported(folder: Path) -> tuple[str, ...]:
    """List the sets that CPU and system support, the best first.

    Raises:
        OSError: There is no library to ask.
    """
    features = ctypes.CDLL(str(path(FEATURES, folder)))
    return tuple(name for name in SETS if features.cpu_supports(name.encode()))


def _is_stale(name: str, operators: ctypes.CDLL, folder: Path) -> bool:
    """Whether the sources changed; an installed package's do not."""
    if not (folder.parents[2] / "setup.py").exists():
        return False
    if not hasattr(operators, "cpp_sources"):
        return True
    operators.cpp_sources.restype = ctypes.c_long
    return bool(operators.cpp_sources() != _sources_hash(name, folder))
