"""What layers with states do alike in plain torch: inputs kept in slots, rows of one token together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from model_server.recurrence.convolution import convolve
from model_server.recurrence.segments import Segments


class TokenRows(Protocol):
    """What a recurrence reads of each token."""

    def part(self, rows: slice) -> Self: ...

    def select(self, rows: Tensor) -> Self: ...


Rows = TypeVar("Rows", bound=TokenRows)


def convolve_kept(inputs: Tensor, weight: Tensor, bias: Tensor | None, segments: Segments, kept: Tensor) -> Tensor:
    """Sum, and keep each segment's newest inputs in its slot."""
    sources, newest = segments.window(len(weight))
    previous = _taken(kept, segments.slots, segments.fresh)
    every = torch.cat((inputs, previous.flatten(0, 1)))
    kept.index_copy_(0, segments.slots, every.index_select(0, newest.view(-1)).view_as(previous))
    return convolve(inputs, weight, bias, previous, sources)


def by_segments(
    tokens: Rows,
    like: Tensor,
    segments: Segments,
    states: Tensor,
    step: Callable[[Rows, Tensor], Tensor],
    sequence: Callable[[Rows, Tensor], Tensor],
) -> Tensor:
    """Compute the rows of one token together by `step`, the others one after another by `sequence`.

    Args:
        like: Has the shape and the type of the outputs.
    """
    if segments.is_decode:
        return _step(tokens, states, segments.slots_host, segments.slots, segments.fresh, step)
    outputs = torch.empty_like(like)
    singles, rows = segments.singles
    if singles:
        fresh = None if segments.fresh is None else segments.fresh[singles]
        slots = [segments.slots_host[number] for number in singles]
        found = _step(tokens.select(rows), states, slots, segments.slots[singles], fresh, step)
        outputs.index_copy_(0, rows, found)
    for number, (first, stop) in enumerate(segments.spans):
        if stop - first > 1:
            state = states[segments.slots_host[number]]
            if segments.starts_host[number] == 0:
                state.zero_()
            outputs[first:stop] = sequence(tokens.part(slice(first, stop)), state)
    return outputs


def _step(
    tokens: Rows,
    states: Tensor,
    slots_host: list[int],
    slots: Tensor,
    fresh: Tensor | None,
    step: Callable[[Rows, Tensor], Tensor],
) -> Tensor:
    """Compute one token of each, in place where the slots follow each other."""
    first = slots_host[0]
    if slots_host == list(range(first, first + len(slots_host))):
        state = states[first : first + len(slots_host)]
        return step(tokens, state if fresh is None else _without(state, fresh))
    state = _taken(states, slots, fresh)
    outputs = step(tokens, state)
    states.index_copy_(0, slots, state)
    return outputs


def _taken(rows: Tensor, slots: Tensor, fresh: Tensor | None) -> Tensor:
    """Return a copy of these slots."""
    taken = rows.index_select(0, slots)
    return taken if fresh is None else _without(taken, fresh)


def _without(rows: Tensor, fresh: Tensor) -> Tensor:
    """Put zeros where a sequence begins: what is in such a slot may be not a number."""
    return rows.masked_fill_(fresh.view(-1, *[1] * (rows.dim() - 1)), 0.0)
