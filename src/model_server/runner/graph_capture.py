"""Captures device work, replayed by one launch: CUDA graphs by a small interface."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch


class CapturedGraph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Repeat with present memory."""

    def release(self) -> None: ...


class GraphCapture(Protocol):
    """Captures pieces of work that share inner memory, so never run at once; the largest first."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run uncaptured: libraries set up, kernels compile."""

    def capture(self, work: Callable[[], object]) -> CapturedGraph:
        """Capture warmed-up work without doing it.

        Raises:
            torch.OutOfMemoryError: Memory is short; RuntimeError if it cannot be captured.
        """

    def capture_pieces(self, work: Callable[[Callable[[], None]], object]) -> tuple[CapturedGraph, ...]:
        """Capture in pieces: calls of the work's argument separate them."""

    def used_bytes(self) -> int:
        """Return the device's memory in use by all."""

    def release(self) -> None:
        """Return the common memory of released graphs."""


class CudaGraphCapture:
    """One stream and memory pool for all graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run on the capture's stream, for which libraries keep workspaces."""
        stream = self._own_stream()
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            work()
        current.wait_stream(stream)

    def capture(self, work: Callable[[], object]) -> CapturedGraph:
        (graph,) = self.capture_pieces(lambda cut: work())
        return graph

    def capture_pieces(self, work: Callable[[Callable[[], None]], object]) -> tuple[CapturedGraph, ...]:
        """Capture without `torch.cuda.graph`, which stays on its stream if both work and capture fail."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graphs: list[torch.cuda.CUDAGraph] = []

        def start_piece() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            # thread_local: Health touches the device from another thread, which must not end the capture.
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            start_piece()

        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what the warm-up run left on the stream
        with torch.cuda.stream(self._own_stream()):
            start_piece()
            try:
                work(cut)
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graphs[-1].capture_end()
                raise
            graphs[-1].capture_end()
        return tuple(_CudaGraph(graph) for graph in graphs)

    def used_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def release(self) -> None:
        self._pool = None  # a pool whose graphs are gone may not be used again
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _own_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._stream


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph
        self.replay = graph.replay

    def release(self) -> None:
        self._graph.reset()


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Pause garbage collection, which may free device memory, as captures forbid."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
