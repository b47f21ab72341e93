"""What recurrent layers remember of requests, in slots of a buffer for each layer."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.config import ServeConfig
from model_server.runner.runner import RequestState, StateSlots
from wire.host import kv_memory
from wire.host.machine import free_memory
from wire.text.counting import counted

logger = logging.getLogger(__name__)


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

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots (from, to) one after another."""
        for source, to in pairs:
            self.inputs[to].copy_(self.inputs[source])
            self.state[to].copy_(self.state[source])

    @property
    def inputs_alone(self) -> LayerStates:
        """View the inputs without states, for the first of two halves of a layer."""
        return LayerStates(self.inputs, self.state[:, :0])

    @property
    def state_alone(self) -> LayerStates:
        """View the states without inputs, for the second half."""
        return LayerStates(self.inputs[:, :0], self.state)


class StatePool:
    """The slots of this rank's recurrent layers, of the same numbers in all of them, which the router gives."""

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

    def layer(self, index: int) -> LayerStates:
        """Return the slots of a layer."""
        return self._layers[index]

    @property
    def num_slots(self) -> int:
        return self._capacity

    def reserve(self, num_slots: int) -> None:
        """Have so many slots at least."""
        added = num_slots - self._capacity
        if added <= 0:
            return
        for layer in self._layers.values():
            layer.inputs = _longer(layer.inputs, added)
            layer.state = _longer(layer.state, added)
        self._capacity = num_slots

    def start(self, requests: Sequence[RequestState], starts: Sequence[int]) -> list[int]:
        """Return each request's slot, in a step that computes its tokens from position `start` on.

        What is to be restored is copied there first, in the order of the requests: one that comes later may have got
        the slot that an earlier one is restored from.
        """
        slots = [request.slot for request in requests]
        self.reserve(max(slots) + 1)
        restored = []
        for request, start in zip(requests, starts, strict=True):
            if start and not request.has_begun:
                if request.restored_from is None:
                    raise RuntimeError(f"a request has no state, of which {start} tokens are said to be computed")
                restored.append((request.restored_from, request.slot))
            request.has_begun = True
        if restored:
            for layer in self._layers.values():
                layer.copy(restored)
        return slots


@dataclass(frozen=True, slots=True)
class ReservedStates:
    """Slots for the states of requests and for saved states; `num_bytes` of all, with one that is of neither."""

    num_slots: int = 0
    num_bytes: int = 0


def reserve_states(
    states: StateSlots | None, config: ServeConfig, device: torch.device, local_size: int
) -> ReservedStates:
    """Allocate the states of recurrent layers, if there are any.

    Args:
        local_size: Shards that share this machine's memory.
    """
    if states is None:
        return ReservedStates()
    on_gpu = device.type == "cuda"
    share = torch.cuda.mem_get_info(device)[0] // 2 if on_gpu else int((free_memory() or 0) * kv_memory.STATES_SHARE)
    asked, batch, share = config.state_slots, config.max_batch_size, share // (1 if on_gpu else local_size)
    num_slots = kv_memory.state_slots(asked, batch, share, states.slot_bytes, on_gpu=on_gpu)
    states.reserve(num_slots + 1)
    num_bytes = (num_slots + 1) * states.slot_bytes
    logger.info("States of recurrent layers: %s, %.1f MiB", counted(num_slots, "slot"), num_bytes / 2**20)
    return ReservedStates(num_slots, num_bytes)


def _longer(rows: Tensor, added: int) -> Tensor:
    longer = rows.new_empty(len(rows) + added, *rows.shape[1:])
    longer[: len(rows)] = rows
    return longer
