"""What recurrent layers remember of requests, in slots of a buffer for each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.runner.runner import RequestState


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a layer keeps of a request."""

    # Of the newest tokens, the nearest first: their number, and channels.
    inputs: tuple[int, int]
    # Of the inputs.
    dtype: torch.dtype
    # Heads, key_dim, value_dim; float32.
    state: tuple[int, int, int]

    @property
    def num_bytes(self) -> int:
        """Return what a slot takes."""
        return math.prod(self.inputs) * self.dtype.itemsize + math.prod(self.state) * torch.float32.itemsize


@dataclass(slots=True)
class LayerStates:
    """One layer's slots, which hold anything until their sequence begins."""

    inputs: Tensor  # [slots, number, channels]
    state: Tensor  # [slots, heads, key_dim, value_dim] float32


class StatePool:
    """The slots of this rank's recurrent layers, of the same numbers in all of them.

    A `RequestState` holds its slot, and gives it back when it goes, however its sequence leaves its batch.
    """

    def __init__(self, shapes: dict[int, StateShape], device: torch.device) -> None:
        """Take the shapes by the layers' indices on this rank."""
        self.slot_bytes = sum(shape.num_bytes for shape in shapes.values())
        self._layers = {
            index: LayerStates(
                torch.empty(0, *shape.inputs, dtype=shape.dtype, device=device),
                torch.empty(0, *shape.state, device=device),
            )
            for index, shape in shapes.items()
        }
        self._capacity = 0
        self._free: list[int] = []

    def layer(self, index: int) -> LayerStates:
        """Return the slots of a layer."""
        return self._layers[index]

    def slots(self, requests: Sequence[RequestState], starts: Sequence[int]) -> list[int]:
        """Return each request's slot, in a step that computes its tokens from position `start` on."""
        return [self._slot(request, start) for request, start in zip(requests, starts, strict=True)]

    def _slot(self, request: RequestState, start: int) -> int:
        if request.kept is None:
            if start:
                raise RuntimeError(f"the state of a request is gone, of which {start} tokens are said to be computed")
            if not self._free:
                self._grow()
            # The lowest: slots that follow each other in the order of the rows are one piece of the buffer.
            number = min(self._free)
            self._free.remove(number)
            request.kept = _Slot(number, self._free)
        slot: _Slot = request.kept
        return slot.number

    def _grow(self) -> None:
        """Add a quarter, so that little memory is unused."""
        added = max(1, self._capacity // 4)
        for layer in self._layers.values():
            layer.inputs = _longer(layer.inputs, added)
            layer.state = _longer(layer.state, added)
        self._free += range(self._capacity, self._capacity + added)
        self._capacity += added


class _Slot:
    """A number that goes back to the free ones when its holder goes."""

    __slots__ = ("_free", "number")

    def __init__(self, number: int, free: list[int]) -> None:
        self.number = number
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.number)


def _longer(rows: Tensor, added: int) -> Tensor:
    longer = rows.new_empty(len(rows) + added, *rows.shape[1:])
    longer[: len(rows)] = rows
    return longer
