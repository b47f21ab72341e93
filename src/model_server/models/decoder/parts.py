"""The parts of a block as the decoder sees them, of every kind.

A rank's part holds a share of heads or intermediate size, and gives partial sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from model_server.attention.backend import AttentionStep
from model_server.layers.rotary import Rotations
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.recurrence.segments import Segments
from model_server.recurrence.states import StatePool, StateShape
from model_server.recurrence.step import RecurrentStep


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one forward share."""

    positions: Tensor  # [num_tokens] int64
    rotations: tuple[Rotations, ...]  # of each distinct Rope, in the order of Loader.ropes
    slots: Tensor  # [num_tokens] int64
    cache: KvCache
    attention: AttentionStep
    is_decode: bool  # every sequence has one token
    segments: Segments | None = None  # None: no layer asks for them
    states: StatePool | None = None  # None: no layer keeps any
    recurrent: RecurrentStep | None = None  # beside `states`
    # Keys and values of the step's tokens that later layers read, by the layer in the cache.
    shared: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    layer_inputs: Tensor | None = None  # [num_tokens, layers, width]; None: layers read none


class AttentionPart(Protocol):
    """Attention, or what a layer has instead, in two calls between which tokens may be dropped."""

    @property
    def kv_shape(self) -> KvShape:
        """What it stores for one token."""

    @property
    def output(self) -> Callable[[Tensor], Tensor]:
        """Return the product from attention values [n, width] to this rank's partial sum."""

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Write K and V of [num_tokens, hidden], and return attention values [num_tokens, width]."""


class MixerPart(AttentionPart, Protocol):
    """What a layer has instead of attention."""

    @property
    def state_shape(self) -> StateShape | None:
        """Return what it keeps of a request beside its blocks; None: nothing."""


class Mlp(Protocol):
    """An MLP of any kind, this rank's part."""

    @property
    def capturable(self) -> bool:
        """Whether CUDA graphs can hold it: it asks the device for nothing."""

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Return this rank's new partial sum [n, hidden]; in the last layer of rows with logits."""
