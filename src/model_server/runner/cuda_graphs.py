"""Decode steps captured for some batch sizes and replayed: one launch a step.

Batches are copied to fixed addresses (`decode_buffers`), padded to the next size. Small steps with prompts are captured
in pieces (`piecewise`); larger ones run as they are. Sampling is outside, as in TGI.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from model_server.adapters.rows import TILE_ROWS, AdapterRows
from model_server.distributed.group import ProcessGroup
from model_server.errors import FatalError
from model_server.kernels.availability import usable
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.runner.decode_buffers import DecodeBuffers
from model_server.runner.graph_capture import CapturedGraph, GraphCapture, without_collector
from model_server.runner.piecewise import TOKEN_SIZES, PiecewiseBuffers, PiecewiseGraph, Recorder
from model_server.runner.runner import Kept, ModelInputs, Runner, RunnerTraits, TokenRow

logger = logging.getLogger(__name__)

Graph = TypeVar("Graph", CapturedGraph, PiecewiseGraph)

# What became of a capture; ranks agree on the smallest.
_IMPOSSIBLE, _NO_MEMORY, _CAPTURED = range(3)


@dataclass(frozen=True, slots=True)
class GraphCost:
    """Memory of graphs: with prompts and the first batch size, whose workspace is shared, and of each further size."""

    first_bytes: int
    next_bytes: int

    def total(self, count: int) -> int:
        """Bytes of `count` graphs."""
        return self.first_bytes + max(0, count - 1) * self.next_bytes if count else 0


class _ImpossibleError(Exception):
    """Work that some rank cannot capture, and why."""


class GraphedRunner:
    """A `Runner` that replays where a graph fits."""

    def __init__(
        self,
        runner: Runner,
        sizes: tuple[int, ...],
        capture: GraphCapture,
        windows: Mapping[int, tuple[int, ...]] | None = None,
        *,
        keeps: Callable[[], Kept | None] | None = None,
    ) -> None:
        """Wrap a runner.

        Args:
            sizes: Batch sizes to capture, the largest first.
            windows: The same by number of places per sequence.
            keeps: Hidden states that decode steps keep; with it prompts are not captured, behind which a drafter
                computes.
        """
        self._keeps = keeps
        self.sizes = sizes
        self._families = {1: sizes, **(windows or {})}
        self._runner = runner
        self._capture = capture
        # By places, batch size, and whether rows have adapters.
        self._graphs: dict[tuple[int, int, bool], CapturedGraph] = {}
        # By places and number of sequences: the batch size that serves them.
        self._fitting: dict[int, list[int]] = {}
        self._buffers: DecodeBuffers | None = None
        self._pieces: dict[tuple[int, bool], PiecewiseGraph] = {}  # by tokens, and whether rows have adapters
        self._piece_buffers: PiecewiseBuffers | None = None
        self._cache: KvCache | None = None

    @property
    def inner(self) -> Runner:
        """What computes the steps."""
        return self._runner

    @property
    def traits(self) -> RunnerTraits:
        return self._runner.traits

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def max_positions(self) -> int | None:
        return self._runner.max_positions

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        return self._runner.kv_shapes

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Batch sizes of decode steps, ascending."""
        return self._captured(1)

    @property
    def num_graphs(self) -> int:
        return sum(map(len, self._families.values()))

    @property
    def captured_tokens(self) -> tuple[int, ...]:
        """List token numbers of captured prompts, ascending."""
        return tuple(sorted(tokens for tokens, adapted in self._pieces if not adapted))

    def set_longest(self, longest: int) -> None:
        self._runner.set_longest(longest)

    def reserve_positions(self, max_positions: int) -> None:
        self._runner.reserve_positions(max_positions)

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        """Replay if possible. Logits hold until the next replay, a residual stream longer, since it may be on
        its way.
        """
        if not self._may_replay(inputs, cache):
            return self._runner.forward(inputs, cache)
        assert self._buffers is not None
        found = self._graph_for(inputs)
        if found is not None and (graph := self._graphs.get((*found, inputs.adapters is not None))) is not None:
            places, size = found
            self._buffers.fill(inputs, places * size)
            graph.replay()
            if inputs.kept is not None:
                self._buffers.give(inputs.kept, inputs.input_ids.shape[0])
            output = self._buffers.output[: inputs.input_ids.shape[0]]
            return output if self.traits.passed_on is None else output.clone()
        if (tokens := self._tokens_for(inputs)) is None:
            return self._runner.forward(inputs, cache)
        attention = self.traits.attention
        assert self._piece_buffers is not None and inputs.logit_rows is not None and attention is not None
        self._piece_buffers.fill(inputs, tokens)
        pieces = self._pieces[tokens, inputs.adapters is not None]
        pieces.replay(attention.start(inputs.attention, cache), inputs.input_ids.shape[0])
        return self._buffers.output[: inputs.logit_rows.shape[0]]

    def capture(self, cache: KvCache, max_length: int, world: ProcessGroup) -> None:
        """Capture steps over `cache` up to `max_length` tokens; all ranks together.

        A size that some rank lacks memory for is left out on all.

        Raises:
            FatalError: One of several ranks ran out of memory outside of a capture.
        """
        started = time.perf_counter()
        self.release()
        used = self._capture.used_bytes()
        if not self._prepare(cache, max_length, world):
            return
        with without_collector():
            self._capture_prompts(cache, world)
            for places, sizes in self._families.items():
                for size in sizes:
                    is_there = self._capture_size(size, places, cache, world)
                    if self._buffers is None:
                        return
                    if places > 1 and not is_there:
                        break  # shorter windows are more useful than this one for fewer sequences
        for places in self._families:
            fitting: list[int] = []
            for size in self._captured(places):
                fitting += [size] * (size + 1 - len(fitting))
            self._fitting[places] = fitting
        logger.info(
            "CUDA graphs for %d batch sizes up to %d, and for steps with prompts of up to %d tokens: %.1f MiB, %.2f s",
            sum(not adapted for *_, adapted in self._graphs),
            max(self.captured_sizes, default=0),
            max(self.captured_tokens, default=0),
            (self._capture.used_bytes() - used) / 2**20,
            time.perf_counter() - started,
        )

    def measure(self, cache: KvCache, max_length: int, world: ProcessGroup) -> GraphCost:
        """Measure graphs' memory over a small cache; all ranks together. Where even these do not fit, it is nothing."""
        self.release()
        used = [self._capture.used_bytes()]
        if not self._prepare(cache, max_length, world):
            return GraphCost(0, 0)
        with without_collector():
            self._capture_prompts(cache, world)
            for size in self.sizes[:2]:
                self._capture_size(size, 1, cache, world)
                used.append(self._capture.used_bytes())
                if self._buffers is None:
                    break
        self.release()
        steps = [max(0, after - earlier) for earlier, after in itertools.pairwise(used)] + [0, 0]
        return GraphCost(steps[0], steps[1])

    def release(self) -> None:
        self._release_pieces()
        for graph in self._graphs.values():
            graph.release()
        self._graphs.clear()
        self._fitting = {}
        had_memory, self._buffers, self._cache = self._buffers is not None, None, None
        if had_memory:
            self._capture.release()

    def _release_pieces(self) -> None:
        for graph in self._pieces.values():
            graph.release()
        self._pieces.clear()
        self._piece_buffers = None

    def _may_replay(self, inputs: ModelInputs, cache: KvCache) -> bool:
        if cache is not self._cache or not (self._graphs or self._pieces):
            return False
        if inputs.adapters is not None and not self._may_adapt(inputs.adapters):
            return False
        assert self._buffers is not None
        if inputs.attention.max_kv_length > self._buffers.max_length:
            # The runner may now move tables that the graphs read where they were.
            logger.warning("A sequence is longer than the limits said: CUDA graphs are off from now on")
            self.release()
            return False
        return True

    def _may_adapt(self, rows: AdapterRows) -> bool:
        slots, tiles = self.traits.slots, rows.all.tiles
        is_narrow = tiles is not None and tiles.shape[1] == 1 + TILE_ROWS
        return slots is not None and is_narrow and slots.is_capturable(rows.all.numbers)

    def _captured(self, places: int) -> tuple[int, ...]:
        return tuple(sorted(size for each, size, adapted in self._graphs if each == places and not adapted))

    def _graph_for(self, inputs: ModelInputs) -> tuple[int, int] | None:
        """Return places and batch size to replay, if there are any."""
        if inputs.logit_rows is not None or not inputs.attention.is_decode:
            return None
        rows = inputs.input_ids.shape[0]
        for places in {inputs.attention.places: None, 1: None}:
            fitting = self._fitting.get(places, [])
            if rows // places < len(fitting):
                return places, fitting[rows // places]
        return None

    def _tokens_for(self, inputs: ModelInputs) -> int | None:
        """Return the number of tokens to replay, if there is one."""
        if inputs.logit_rows is None or inputs.embeddings or inputs.hidden is not None or inputs.positions.dim() > 1:
            return None
        if inputs.attention.last_keys is not None:
            return None
        tokens, rows, has_adapters = inputs.input_ids.shape[0], inputs.logit_rows.shape[0], inputs.adapters is not None
        fitting = [size for size, adapted in self._pieces if size >= tokens and adapted == has_adapters]
        if self._piece_buffers is None or not fitting or rows > self._piece_buffers.rows(min(fitting)):
            return None
        return min(fitting)

    def _prepare(self, cache: KvCache, max_length: int, world: ProcessGroup) -> bool:
        """Make the buffers, if memory and step allow it on all ranks."""
        if self.traits.is_stage and not world.all_reduce_min(int(self.traits.capturable)):
            logger.info("CUDA graphs are off: the decode step of a stage needs the host")
            return False
        self._runner.reserve_positions(max_length)
        width, has_memory = -(-max_length // cache.block_size), 1
        self._cache = cache
        device = cache.rows[0].device
        try:
            output = self.traits.passed_on or TokenRow(self.vocab_size, torch.float32)
            most = max(places * sizes[0] for places, sizes in self._families.items())
            received, num_slots = self.traits.received, self._num_slots(device)
            self._buffers = DecodeBuffers(most, width, max_length, output, device, received, num_slots)
            self._piece_buffers = PiecewiseBuffers(TOKEN_SIZES[0], self.sizes[0], max_length, device, num_slots)
        except torch.OutOfMemoryError:
            has_memory = 0
        if world.all_reduce_min(has_memory):
            return True
        logger.warning("No memory for the buffers of %d rows: decode runs without CUDA graphs", self.sizes[0])
        self.release()
        return False

    def _capture_prompts(self, cache: KvCache, world: ProcessGroup) -> None:
        """Capture steps with prompts, first, being largest; failures leave decode steps."""
        traits = self.traits
        if traits.attention is None or traits.is_stage or not traits.in_pieces or self._keeps is not None:
            return
        families = (False, True) if self._num_slots(cache.rows[0].device) else (False,)
        for tokens, adapted in itertools.product(TOKEN_SIZES, families):
            try:
                capture = partial(self._pieces_of, tokens, cache, world, adapted=adapted)
                found = self._agreed(f"{tokens} tokens with prompts", capture, world)
            except _ImpossibleError as error:
                logger.warning("Steps with prompts run without CUDA graphs: %s", error)
                if self._pieces:
                    self._release_pieces()
                    self._capture.release()
                return
            if found is not None:
                self._pieces[tokens, adapted] = found

    def _capture_size(self, size: int, places: int, cache: KvCache, world: ProcessGroup) -> bool:
        """Capture one size, with adapters too, on all ranks or none; return whether."""
        what = f"{size} rows" if places == 1 else f"{size} rows with drafts of {places - 1} tokens, and of fewer rows"
        try:
            for adapted in (False, True) if self._num_slots(cache.rows[0].device) else (False,):
                capture = partial(self._graph_of, size, places, cache, world, adapted=adapted)
                found = self._agreed(what, capture, world)
                if found is not None:
                    self._graphs[places, size, adapted] = found
        except _ImpossibleError as error:
            logger.warning("Decode runs without CUDA graphs: %s", error)
            self.release()
            return False
        return (places, size, False) in self._graphs

    def _num_slots(self, device: torch.device) -> int:
        """Return adapters' slots for rows in tiles; 0: not captured."""
        slots = self.traits.slots
        return slots.num_slots if slots is not None and usable(device) else 0

    def _graph_of(self, size: int, places: int, cache: KvCache, world: ProcessGroup, *, adapted: bool) -> CapturedGraph:
        buffers = self._buffers
        assert buffers is not None
        kept = None if self._keeps is None else self._keeps()
        output = buffers.output[: size * places]
        inputs = replace(buffers.inputs(size * places, places, adapted=adapted), kept=kept, output=output)

        def work() -> None:
            self._compute(inputs, cache, output)
            if kept is not None:
                buffers.hold(kept)

        self._warm_up(work, world)
        return self._capture.capture(work)

    def _pieces_of(self, tokens: int, cache: KvCache, world: ProcessGroup, *, adapted: bool) -> PiecewiseGraph:
        buffers, decode = self._piece_buffers, self._buffers
        assert buffers is not None and decode is not None
        logits = decode.output[: buffers.rows(tokens)]
        recorder = Recorder(buffers)

        def work(cut: Callable[[], None]) -> None:
            inputs = replace(buffers.inputs(tokens, recorder.start(cut), adapted=adapted), output=logits)
            self._compute(inputs, cache, logits)

        self._warm_up(lambda: work(lambda: None), world)
        return PiecewiseGraph(self._capture.capture_pieces(work), tuple(recorder.calls))

    def _compute(self, inputs: ModelInputs, cache: KvCache, output: Tensor) -> None:
        """Compute into `output`: as outputs of their own, the logits of all sizes together would take gigabytes."""
        computed = self._runner.forward(inputs, cache)
        if computed is not output:  # the residual stream, or a head that cannot write there
            output.copy_(computed)

    def _agreed(self, what: str, capture: Callable[[], Graph], world: ProcessGroup) -> Graph | None:
        """Return what `capture` gives, if all ranks have memory.

        Raises:
            _ImpossibleError: A rank's driver refuses.
        """
        graph: Graph | None = None
        outcome, reason = _CAPTURED, ""
        try:
            graph = capture()
        except torch.OutOfMemoryError:
            outcome = _NO_MEMORY
        except RuntimeError as error:
            # The driver's memory (a graph, a module that is loaded) is not that of torch's allocator, nor its error.
            outcome = _NO_MEMORY if "out of memory" in str(error) else _IMPOSSIBLE
            reason = str(error).partition("\n")[0]
        agreed = world.all_reduce_min(outcome)
        if agreed == _CAPTURED:
            return graph
        if graph is not None:
            graph.release()
        if not self._graphs and not self._pieces:
            self._capture.release()  # a new pool: one that holds no graph may not be used again
        if agreed == _IMPOSSIBLE:
            raise _ImpossibleError(reason or "another rank says why")
        logger.warning("No memory for a CUDA graph of %s: it is left out", what)
        return None

    def _warm_up(self, work: Callable[[], object], world: ProcessGroup) -> None:
        try:
            self._capture.warm_up(work)
        except torch.OutOfMemoryError as error:
            if world.size > 1:  # the others wait for this rank inside of a collective
                raise FatalError("out of memory in a decode step; lower --cuda-memory-fraction") from error
            raise
