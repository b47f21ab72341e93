"""Imported by Python at its start: puts FAKE_CARD_KERNELS (run.py) in force in every process of the project, as soon as
it imports the modules that matter.

FAKE_CARD_SET=MODULE:NAME=VALUE;... gives constants of the project other values, for large models and for the
interpreter; FAKE_CARD_ALSO=FILE runs a file of a test's own. Without numbers it replaces
`availability._failed_trial` and `Sampled.to_host`.
"""

from __future__ import annotations

import ast
import collections
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

_MADE_UP_ID = 300  # ends no sequence


def _compute_numbers() -> None:
    from stand_in import numbers, report

    if getattr(_compute_numbers, "is_done", False):
        return
    _compute_numbers.is_done = True  # type: ignore[attr-defined]
    numbers.install()
    if folder := os.environ.get("FAKE_CARD_REPORT"):
        report.begin(Path(folder))


def _skip_trial() -> None:
    """The trial of the kernels compares numbers."""
    sys.modules["model_server.kernels.availability"]._failed_trial = lambda device: None  # type: ignore[attr-defined]


def _make_up_ids() -> None:
    """Wait for the step as usual, then answer with an id of a token."""
    sampled = sys.modules["model_server.sampling.sampler"].Sampled  # type: ignore[attr-defined]
    original = sampled.to_host

    def to_host(self: Any) -> Any:
        if self._copied is not None:
            self._copied.synchronize()
        self._packed.zero_()
        self._packed[0] += _MADE_UP_ID
        self._copied = None
        return original(self)

    sampled.to_host = to_host


def _set(module: str, name: str, value: str) -> None:
    setattr(sys.modules[module], name, ast.literal_eval(value))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls functions once a module was imported."""

    def __init__(self, hooks: dict[str, list[Callable[[], None]]]) -> None:
        self._hooks = hooks

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        after = self._hooks.pop(name, None)
        if after is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            for function in after:
                function()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _begin() -> None:
    mode = os.environ.get("FAKE_CARD_KERNELS", "none")
    hooks: dict[str, list[Callable[[], None]]] = collections.defaultdict(list)
    if mode == "numbers":
        for name in ("model_server.device", "model_server.memory.kv_cache"):
            hooks[name].append(_compute_numbers)
    elif mode == "null":
        hooks["model_server.kernels.availability"].append(_skip_trial)
        hooks["model_server.sampling.sampler"].append(_make_up_ids)
    elif mode != "none":
        sys.stderr.write(f"FAKE_CARD_KERNELS is {mode!r}: numbers, null or none\n")
        os._exit(2)
    for asked in filter(None, os.environ.get("FAKE_CARD_SET", "").split(";")):
        place, _, value = asked.partition("=")
        module, _, name = place.partition(":")
        hooks[module].append(partial(_set, module, name, value))
    if hooks:
        sys.meta_path.insert(0, _AfterImport(hooks))
    if os.environ.get("FAKE_CARD_COVERAGE"):
        os.environ["COVERAGE_PROCESS_START"] = str(Path(__file__).resolve().parents[1] / "coveragerc")
        import coverage

        coverage.process_startup()
    if also := os.environ.get("FAKE_CARD_ALSO"):  # a file of a test's own
        exec(compile(Path(also).read_text(), also, "exec"), {"__name__": "also"})


_begin()
