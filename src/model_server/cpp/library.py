"""The operators for this CPU, loaded once, on torch's OpenMP threads."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import TypeVar

import torch

from model_server.cpp.config import SWITCH, are_switched_off, instruction_set_cap
from model_server.cpp.instruction_sets import SETS, is_served, module, path, survey
from model_server.cpp.openmp import entry_points
from model_server.cpp.structs import FUNCTIONS, WITHOUT_STATUS

D = TypeVar("D", bound=ctypes.CDLL)
logger = logging.getLogger(__name__)

TYPES = {torch.float32: 0, torch.bfloat16: 1}


@cache
def library() -> ctypes.CDLL | None:
    """Load the operators, or log once why there are none."""
    if are_switched_off():
        logger.info("C++ operators are switched off (%s=0): torch's are used", SWITCH)
        return None
    found = survey(instruction_set_cap())
    if found.chosen is None:
        level = logging.WARNING if is_served() else logging.INFO
        logger.log(level, "No C++ operators, torch's are used: %s", found.lack())
        return None
    for fault in found.faults:
        logger.warning("C++ operators: %s", fault)
    loaded = _declared(ctypes.CDLL(str(path(module(found.chosen)))))
    entries = entry_points()
    if entries is None:
        logger.warning("torch's OpenMP runtime was not found: C++ operators run on one thread")
    else:
        loaded.cpp_init(*entries)
    logger.info("C++ operators for %s: products, norms and attention on this CPU", found.chosen)
    return loaded


def instruction_set() -> str:
    """Return the operators' set. Only after `usable`."""
    return next(name for name in SETS if str(path(module(name))) == prepared()._name)


@cache
def without_gil_release() -> ctypes.CDLL:
    """Return operators for calls of microseconds, which keep the interpreter's lock: regaining it takes longer."""
    return _declared(ctypes.PyDLL(prepared()._name))


def _declared(loaded: D) -> D:
    for name, arguments in FUNCTIONS.items():
        function = getattr(loaded, name)
        function.argtypes = arguments
        function.restype = None if name == "cpp_init" else ctypes.c_long
        if name not in WITHOUT_STATUS:
            function.errcheck = _checked
    return loaded


def _checked(status: int, function: object, arguments: object) -> None:
    if status:
        raise MemoryError("a C++ operator found no memory for its scratch")


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether C++ operators serve this device and type."""
    return device.type == "cpu" and dtype in TYPES and library() is not None


def prepared() -> ctypes.CDLL:
    """Return the library, with torch's number of threads set on this thread. Only after `usable`."""
    loaded = library()
    assert loaded is not None
    torch.get_num_threads()
    return loaded
