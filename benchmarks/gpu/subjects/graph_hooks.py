"""CUDA graphs for an engine that a benchmark has made itself, as the shard makes them at warm-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from model_server.distributed.group import ProcessGroup
from model_server.engine.engine import Engine
from model_server.runner.graph_capture import CudaGraphCapture
from model_server.runner.graph_choice import with_graphs
from model_server.runner.runner import Runner


def graphed(runner: Runner, device: torch.device, sizes: tuple[int, ...]) -> Runner:
    """A runner that captures decode steps of these batch sizes once `capture` is called; `runner` itself where that is
    not possible: on a CPU, and with a model or backend whose step needs the host."""
    if device.type != "cuda":
        return runner
    return with_graphs(runner, tuple(sorted(sizes, reverse=True)), CudaGraphCapture(device))


def capture(engine: Engine, max_length: int) -> tuple[int, ...]:
    """Capture the sizes that the engine's runner was made for, over its cache; those that were captured."""
    runner: Any = engine.runner
    if not hasattr(runner, "capture"):
        return ()
    runner.capture(engine.cache, max_length, ProcessGroup())
    captured: tuple[int, ...] = runner.captured_sizes
    return captured


class RepeatingGraphCapture:
    """What stands for CUDA graphs on a CPU: a capture does the work again, from the same buffers."""

    def warm_up(self, work: Callable[[], object]) -> None:
        work()

    def capture(self, work: Callable[[], object]) -> Repeated:
        return Repeated(work)

    def capture_pieces(self, work: Callable[[Callable[[], None]], object]) -> tuple[Repeated, ...]:
        raise RuntimeError("work that is done again cannot be done in pieces")

    def used_bytes(self) -> int:
        return 0

    def release(self) -> None:
        """Nothing is held."""


class Repeated:
    """See `RepeatingGraphCapture`."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work

    def replay(self) -> None:
        if self._work is None:
            raise RuntimeError("the capture was released")
        self._work()

    def release(self) -> None:
        self._work = None
