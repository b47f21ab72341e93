"""A step of recurrent layers, cut where states are saved, and planned once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.recurrence.segments import Segments, starts_of
from model_server.recurrence.states import LayerStates, StatePool
from model_server.runner.runner import RequestState

# Computes a layer between its products.
Net = Callable[[Tensor, Segments, LayerStates], Tensor]


@dataclass(frozen=True, slots=True)
class StepPart:
    """Tokens that are computed together."""

    first: int
    stop: int
    segments: Segments
    # Slots (from, to) that are copied behind it.
    saves: tuple[tuple[int, int], ...] = ()


class RecurrentStep:
    """A step's tokens in parts."""

    def __init__(self, parts: Sequence[StepPart]) -> None:
        self.parts = parts

    def __call__(self, net: Net, projected: Tensor, states: LayerStates) -> Tensor:
        """Compute the step's tokens in a layer, and save states on the way; no bit depends on the cuts on a CPU."""
        outputs = []
        for part in self.parts:
            outputs.append(net(projected[part.first : part.stop], part.segments, states))
            states.copy(part.saves)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def plan_step(
    metadata: AttentionMetadata, block_size: int, pool: StatePool, requests: Sequence[RequestState]
) -> RecurrentStep:
    """Give each sequence its state, restored if need be, and find where states are saved."""
    starts = starts_of(metadata)
    slots = pool.start(requests, starts)
    bounds = list(accumulate(metadata.query_lengths_host, initial=0))
    saves: dict[int, list[tuple[int, int]]] = {}
    for request, start, (first, stop) in zip(requests, starts, pairwise(bounds), strict=True):
        for position, slot in request.saves:
            if start < position <= start + stop - first:
                saves.setdefault(first + position - start, []).append((request.slot, slot))
    if not saves:
        return RecurrentStep([StepPart(0, bounds[-1], Segments(metadata, block_size, slots))])
    cuts = sorted({0, *saves, bounds[-1]})
    return RecurrentStep(
        [
            StepPart(
                first,
                stop,
                _segments(metadata, block_size, slots, starts, bounds, first, stop),
                tuple(saves.get(stop, ())),
            )
            for first, stop in pairwise(cuts)
        ]
    )


def _segments(
    metadata: AttentionMetadata,
    block_size: int,
    slots: Sequence[int],
    starts: Sequence[int],
    bounds: Sequence[int],
    first: int,
    stop: int,
) -> Segments:
    """Return the segments of the tokens [first, stop)."""
    spans = [(max(a, first), min(b, stop)) for a, b in pairwise(bounds)]
    taking = [number for number, (a, b) in enumerate(spans) if a < b]
    counts = [spans[i][1] - spans[i][0] for i in taking]
    ends = [starts[i] + spans[i][1] - bounds[i] for i in taking]
    device = metadata.kv_lengths.device
    part = replace(
        metadata,
        slots=metadata.slots[first:stop],
        block_tables=metadata.block_tables[taking[0] : taking[-1] + 1],
        cu_seqlens_q=torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device),
        kv_lengths=torch.tensor(ends, dtype=torch.int32, device=device),
        query_lengths_host=tuple(counts),
        kv_lengths_host=tuple(ends),
        last_keys=None,
        first_keys=None,
        adapters=None,
    )
    return Segments(part, block_size, [slots[i] for i in taking])
