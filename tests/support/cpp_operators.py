"""The C++ operators without torch, on numpy arrays in memory of exactly their size: a sanitizer sees each step beside
them."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from model_server.cpp.structs import FUNCTIONS, WITHOUT_STATUS

FLOAT, BF16 = 0, 1
_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
_libc.free.argtypes = (ctypes.c_void_p,)


class Operators:
    """One library, on `threads` threads of an OpenMP runtime: the one that torch brings along if none is given."""

    def __init__(self, library: Path, threads: int, runtime: Path | None = None) -> None:
        self._library = ctypes.CDLL(str(library))
        for name, arguments in FUNCTIONS.items():
            function = getattr(self._library, name)
            function.argtypes = arguments
            function.restype = None if name == "cpp_init" else ctypes.c_long
            if name not in WITHOUT_STATUS:
                function.errcheck = self._done
        self._openmp = openmp = ctypes.CDLL(str(runtime or runtime_of_torch()))
        assert self._library.cpp_prepare() == 0
        names = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads"
        self._library.cpp_init(*(ctypes.cast(getattr(openmp, name), ctypes.c_void_p) for name in names))
        assert self._library.cpp_prepare() == 0, "the kernel does not let this process use tiles"
        self.set_threads(threads)
        self.panel = self._library.cpp_panel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def set_threads(self, threads: int) -> None:
        self._openmp.omp_set_num_threads(threads)
        self.threads = threads

    def _done(self, status: int, function: object, arguments: object) -> None:
        assert status == 0
        # The model of the tile instructions knows whether a thread has kept a configuration.
        left = getattr(self._library, "tile_model_configured_threads", None)
        assert left is None or left() == 0

    def same_on_one_thread(self, run: Callable[[], np.ndarray]) -> np.ndarray:
        """What `run` gives: to the bit the same on one thread and on all of them."""
        out, threads = run(), self.threads
        self.set_threads(1)
        np.testing.assert_array_equal(run(), out)
        self.set_threads(threads)
        return out

    def packed(self, type: int, weight: np.ndarray) -> np.ndarray:
        """weight [outputs, inputs] -> its panels."""
        outputs, inputs = weight.shape
        panels = exact(np.empty((math.ceil(outputs / self.panel) * self.panel, inputs), weight.dtype))
        self.cpp_pack(type, address(exact(weight)), address(panels), outputs, inputs)
        return panels


def runtime_of_torch() -> Path:
    """Found without an import of torch."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return next((Path(found.origin).parent / "lib").glob("libgomp*"))


def exact(values: np.ndarray, is_shifted: bool = False) -> np.ndarray:
    """A copy that ends where its memory does, and begins there unless it is shifted by one number."""
    shift = values.itemsize if is_shifted else 0
    start = _libc.malloc(values.nbytes + shift)
    memory = (ctypes.c_uint8 * values.nbytes).from_address(start + shift)
    weakref.finalize(memory, _libc.free, start)
    out: np.ndarray = np.frombuffer(memory, values.dtype) if values.size else np.empty(0, values.dtype)
    out = out.reshape(values.shape)
    out[...] = values
    return out


def rows_apart(values: np.ndarray, stride: int, is_shifted: bool = False) -> np.ndarray:
    """A copy of [rows, width] whose rows begin `stride` numbers apart; nothing lies behind the last one."""
    rows, width = values.shape
    if not rows:
        return values
    flat = np.zeros((rows - 1) * stride + width, values.dtype)
    out = np.lib.stride_tricks.as_strided(
        exact(flat, is_shifted), values.shape, (stride * values.itemsize, values.itemsize)
    )
    out[...] = values
    return out


class Address(ctypes.c_void_p):
    """Keeps the array alive for as long as a call takes; a structure copies the number alone."""

    values: np.ndarray


def address(values: np.ndarray | None) -> Address | None:
    """As torch says it: null for none and for an array of no numbers."""
    if values is None or not values.size:
        return None
    out = Address(values.ctypes.data)
    out.values = values
    return out


def narrow(values: np.ndarray) -> np.ndarray:
    """Floats as bfloat16, to nearest even: uint16."""
    bits = values.astype(np.float32).view(np.uint32)
    out: np.ndarray = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return out


def widen(values: np.ndarray) -> np.ndarray:
    """What the operators read and write, as float64."""
    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


AS: dict[int, Callable[[np.ndarray], np.ndarray]] = {FLOAT: lambda values: values.astype(np.float32), BF16: narrow}
DTYPE = {FLOAT: np.float32, BF16: np.uint16}
# Of results whose terms are about 1: a rounding of the result, one of what is summed.
TOLERANCE = {FLOAT: 2e-5, BF16: 2.0**-6}


def assert_near(out: np.ndarray, wanted: np.ndarray, tolerance: float, scale: float | np.ndarray = 1.0) -> None:
    """Within `tolerance` of `scale` or of the number itself, whichever is larger; NaN is near nothing."""
    off = np.abs(widen(out) - wanted) - tolerance * np.maximum(np.abs(wanted), scale)
    assert (off <= 0).all(), (
        f"{np.count_nonzero(~(off <= 0))} of {off.size} are wrong, at first {np.argwhere(~(off <= 0))[0]}"
    )
