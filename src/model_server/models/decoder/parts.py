"""The parts of a block as the decoder sees them. Every kind of attention and of MLP is one of these.

On several ranks a part holds a share of the heads or of the intermediate dimension. What it gives at the end is a
partial sum: the block sums over the ranks, once for attention and once for the MLP, or once for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model_server.attention.backend import AttentionStep
from model_server.layers.rotary import Rotations
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.recurrence.segments import Segments


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


class AttentionPart(Protocol):
    """Attention of this rank's heads, or what a layer has instead, in two calls: tokens that are no longer needed are
    dropped in between."""

    @property
    def kv_shape(self) -> KvShape:
        """What it stores for one token."""

    @property
    def output(self) -> Callable[[Tensor], Tensor]:
        """Attention values [n, width] -> this rank's partial sum [n, hidden], a new tensor."""

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Write K and V of [num_tokens, hidden] to the cache; attention values [num_tokens, width]."""


class MixerPart(AttentionPart, Protocol):
    """What a layer has instead of attention, of this rank's heads or channels."""

    @property
    def state_bytes(self) -> int:
        """What it keeps of one request beside the request's blocks."""


class Mlp(Protocol):
    """An MLP of any kind: this rank's part of the intermediate dimension."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold it: it asks the device for nothing."""

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """[n, hidden] -> this rank's partial sum [n, hidden], a new tensor.

        The rows are the tokens of the step; in the last layer those whose logits are wanted.
        """
