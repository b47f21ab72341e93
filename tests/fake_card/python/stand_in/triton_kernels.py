"""Numbers for Triton's kernels on the stand-in card: each launch compiles and is launched as on a card, and is also
queued as a run in Triton's interpreter over the same memory.

The interpreter is chosen when a kernel is defined, so Triton's Python and the project's kernels are imported a second
time with it on. It knows no launch beside the kernel before (`kernels/dependent.py`): waiting for that one does nothing
there, since the queue has run it.
"""

from __future__ import annotations

import collections
import importlib
import os
import pkgutil
import sys
import time
from types import ModuleType
from typing import Any

import torch
from support.triton_interpreter import adapt

from stand_in import queued
from stand_in.places import Place

KERNELS = "model_server.kernels"

launched: collections.Counter[str] = collections.Counter()
seconds: collections.Counter[str] = collections.Counter()  # in the interpreter

_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8e4nv": "float8e4nv"}
_LAUNCH_OPTIONS = {"launch_pdl", "num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion"}


class _Second:
    """Triton's Python and the project's kernels with the interpreter on."""

    def __init__(self) -> None:
        saved = {name: module for name, module in sys.modules.items() if _is_triton(name)}
        attributes = {}  # `import a.b` also sets the attribute on the package: to be put back
        for name in saved:
            parent, _, child = name.rpartition(".")
            attributes[name] = getattr(sys.modules.get(parent), child, None) if parent else None
        for name in saved:
            if not name.startswith("triton._C"):
                del sys.modules[name]
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            _adapt(importlib.import_module("triton.runtime.interpreter"))
            package = importlib.import_module(KERNELS)
            for module in pkgutil.walk_packages(package.__path__, KERNELS + "."):
                importlib.import_module(module.name)
            self.kernels: dict[str, ModuleType] = {
                name: module for name, module in sys.modules.items() if name.startswith(KERNELS)
            }
            self.language = sys.modules["triton.language"]
            _forget_waits(self.language)
        finally:
            del os.environ["TRITON_INTERPRET"]
            for name in [name for name in sys.modules if _is_triton(name)]:
                del sys.modules[name]
            sys.modules.update(saved)
            for name in saved:
                parent, _, child = name.rpartition(".")
                if parent in sys.modules and attributes[name] is not None:
                    setattr(sys.modules[parent], child, attributes[name])

    def kernel(self, function: Any) -> Any:
        """The interpreted copy of a kernel."""
        return getattr(self.kernels[function.fn.__module__], function.fn.__name__)

    def argument(self, value: Any) -> Any:
        """An argument of a launch for the interpreted copy."""
        import triton.language as tl
        from triton.runtime.jit import JITFunction

        if isinstance(value, torch.Tensor):
            return Place(value) if value.is_cuda else value.clone()
        if isinstance(value, tl.dtype):
            return getattr(self.language, _DTYPE_NAMES.get(value.name, value.name))
        if isinstance(value, tl.constexpr):
            return self.argument(value.value)
        return self.kernel(value) if isinstance(value, JITFunction) else value


def _is_triton(name: str) -> bool:
    return name == "triton" or name.startswith(("triton.", KERNELS))


def _adapt(interpreter: Any) -> None:
    """A kernel's arguments are the memory itself: nothing is copied back, and views with one start but several lengths
    are no fault."""
    interpreter.GridExecutor._restore_args_dev = lambda self, *args: None
    adapt(interpreter)


def _forget_waits(language: Any) -> None:
    cuda = getattr(language.extra, "cuda", None)
    for name in ("gdc_wait", "gdc_launch_dependents"):
        if hasattr(cuda, name):
            setattr(cuda, name, lambda *args, **kwargs: None)


_second: _Second | None = None


def install() -> None:
    """Once, for all threads."""
    from triton.runtime.jit import JITFunction

    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        global _second
        result = original(self, *args, grid=grid, warmup=warmup, **kwargs)
        if warmup:
            return result
        _second = _second or _Second()
        second, name = _second, self.fn.__name__
        kernel = second.kernel(self)
        given = [second.argument(x) for x in args]
        named = {key: second.argument(value) for key, value in kwargs.items() if key not in _LAUNCH_OPTIONS}
        launched[name] += 1

        def interpret() -> None:
            began = time.perf_counter()
            real = {key: _real(value) for key, value in named.items()}
            kernel.run(*map(_real, given), grid=grid, warmup=False, **real)
            seconds[name] += time.perf_counter() - began

        queued.enqueue(interpret)
        return result

    JITFunction.run = run


def _real(value: Any) -> Any:
    return value.tensor() if isinstance(value, Place) else value
