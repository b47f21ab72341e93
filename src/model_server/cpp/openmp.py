"""Torch's OpenMP runtime: entry points for the C++ operators, and what its threads cost."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

_MAPS = Path("/proc/self/maps")
_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads")
# omp_pause_soft of OpenMP 5.0: what was set, such as the number of threads, stays.
_SOFT = 1


def entry_points() -> list[ctypes.c_void_p] | None:
    """Return what `cpp_init` takes (team.hpp), if the runtime is found."""
    runtime = _runtime()
    return None if runtime is None else [ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in _FUNCTIONS]


def release_threads() -> None:
    """End the helpers of the calling thread's operators; the next one makes new ones."""
    # With more threads than cores, helpers look for work a hundred times, not 300,000 times, before they sleep
    # (GOMP_SPINCOUNT), and every operator begins with a wake-up. A thread that only loads the model must not leave its
    # helpers behind.
    pause = getattr(_runtime(), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_SOFT)


@cache
def _runtime() -> ctypes.CDLL | None:
    """Find GNU's OpenMP runtime, or LLVM's, which knows its names."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count(" ") > 5 and ".so" in line}
    # The one that came with torch; there may be several, because other packages bring their own.
    home = str(Path(torch.__file__).parent)
    for path in sorted(paths, key=lambda path: (not path.startswith(home), path)):
        if not Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
            continue
        try:
            runtime = ctypes.CDLL(path)
        except OSError:  # replaced on disk since it was loaded
            continue
        if all(hasattr(runtime, name) for name in _FUNCTIONS):
            return runtime
    return None
