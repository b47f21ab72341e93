"""Stand-ins for what only a GPU has: graphs, pinned buffers, a runner whose lengths are on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Semaphore, Thread

import torch
from support.fake_model import FakeRunner, FakeStageRunner
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.memory.kv_cache import KvCache
from model_server.memory.transfer import Staging
from model_server.runner.runner import ModelInputs, RunnerTraits


@dataclass
class CapturableRunner(FakeRunner):
    """Believes the lengths on the device alone, as a captured step does; the host's are only upper bounds.

    `lose_memory_at`: numbers of rows in whose steps memory runs out. `seen` counts rows of its forwards.
    """

    traits: RunnerTraits = RunnerTraits(capturable=True)  # noqa: RUF009 (frozen)
    lose_memory_at: set[int] = field(default_factory=set)
    seen: list[int] = field(default_factory=list)

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        metadata = inputs.attention
        self.seen.append(len(metadata.query_lengths_host))
        if self.seen[-1] in self.lose_memory_at:
            raise torch.OutOfMemoryError("no memory")
        lengths = tuple(metadata.kv_lengths.tolist())
        assert all(true <= said for true, said in zip(lengths, metadata.kv_lengths_host, strict=True))
        true = AttentionMetadata(
            slots=metadata.slots,
            block_tables=metadata.block_tables,
            cu_seqlens_q=metadata.cu_seqlens_q,
            kv_lengths=metadata.kv_lengths,
            query_lengths_host=metadata.query_lengths_host,
            kv_lengths_host=lengths,
        )
        return super().forward(replace(inputs, attention=true), cache)


@dataclass
class CapturableStageRunner(CapturableRunner, FakeStageRunner):
    """One stage of a pipeline on a GPU."""


@dataclass
class PlainGraph:
    """Does the work again."""

    replay: Callable[[], object]
    released: bool = False

    def release(self) -> None:
        assert not self.released
        self.released = True


class InPieces:
    """Does work again, in a thread that stands still at each cut until its next piece is asked for."""

    def __init__(self, work: Callable[[Callable[[], None]], object]) -> None:
        self._work = work
        self._go, self._stopped = Semaphore(0), Semaphore(0)
        self._error: BaseException | None = None

    def first(self) -> None:
        Thread(target=self._run, daemon=True).start()
        self.next()

    def next(self) -> None:
        self._go.release()
        assert self._stopped.acquire(timeout=60), "the work has fewer pieces"
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        self._go.acquire()
        try:
            with torch.inference_mode():
                self._work(self._cut)
        except BaseException as error:
            self._error = error
        self._stopped.release()

    def _cut(self) -> None:
        self._stopped.release()
        self._go.acquire()


@dataclass
class PlainGraphCapture:
    """A `GraphCapture` that captures nothing. `fail`: the error that capture a number of rows ends with, by its turn.

    `bytes_used` grows by `cost` with each capture.
    """

    fail: dict[int, Exception] = field(default_factory=dict)
    cost: int = 0
    bytes_used: int = 0
    graphs: list[PlainGraph] = field(default_factory=list)

    def warm_up(self, work: Callable[[], object]) -> None:
        work()

    def capture(self, work: Callable[[], object]) -> PlainGraph:
        if (error := self.fail.get(len(self.graphs))) is not None:
            self.fail.pop(len(self.graphs))
            raise error
        self.bytes_used += self.cost
        self.graphs.append(PlainGraph(work))
        return self.graphs[-1]

    def capture_pieces(self, work: Callable[[Callable[[], None]], object]) -> tuple[PlainGraph, ...]:
        """Does the work once, to learn how many pieces it has."""
        cuts: list[None] = []
        work(lambda: cuts.append(None))
        pieces = InPieces(work)
        first = self.capture(pieces.first)
        rest = [PlainGraph(pieces.next) for _ in cuts]
        self.graphs += rest
        return (first, *rest)

    def used_bytes(self) -> int:
        return self.bytes_used

    def release(self) -> None:
        assert all(graph.released for graph in self.graphs)
        self.bytes_used = 0


@dataclass(eq=False)
class FakeEvent:
    """Counts its uses; what it marks is over at once."""

    recorded: int = 0
    waited: int = 0

    def record(self) -> None:
        self.recorded += 1

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.waited += 1


def copying_staging() -> Staging:
    """Uploads as to a GPU: through buffers, to memory of their own."""
    return Staging(torch.device("cpu"), allocate=lambda size: torch.empty(size, dtype=torch.uint8), new_event=FakeEvent)
