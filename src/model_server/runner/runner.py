"""The one interface behind which every way of running a model stands.

The engine hands over a flattened batch and gets logits; it never sees which family or which runner it talks to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.memory.kv_cache import KvCache, KvShape


class RequestState:
    """A place where a runner may keep what it remembers of one request, beside or instead of the paged cache.

    It is made with the request's sequence and goes with it, however that leaves its batch: nobody has to be told.
    prompt_length: how many of the request's tokens are its prompt.
    """

    __slots__ = ("kept", "prompt_length")

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self.kept: Any = None


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One flattened forward. `logit_rows` picks the token rows whose logits are wanted, in order; None means all.
    `states` holds one entry for each sequence; only a runner that `KeepsState` asks for them."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    attention: AttentionMetadata
    logit_rows: Tensor | None  # [num_rows] int64
    states: tuple[RequestState, ...] = ()


class Runner(Protocol):
    """A loaded model on this rank."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits, which may exceed the tokenizer's vocabulary."""

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the positions allow; None if unbounded."""

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        """Per layer, what one token's K and V take on this rank."""

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        """Write the step's K/V into `cache` and return logits [num_rows, vocab_size] float32, equal on every rank."""


@runtime_checkable
class KeepsState(Protocol):
    """A runner whose requests live in their `RequestState`, not in the paged cache (its `kv_shapes` are empty).

    It computes a prompt in one forward, from its beginning: no chunks, no shared prefixes, no preemption. Blocks are
    still handed out for such requests, so that budgets hold, but they are numbers only.
    """

    @property
    def state_bytes(self) -> int:
        """Upper bound of the memory that a request takes for each of its KV blocks."""

    @property
    def decoder_prefix(self) -> tuple[int, ...] | None:
        """The tokens that stand before the first generated one where that is not the prompt (encoder-decoder)."""


@runtime_checkable
class HasPositionTable(Protocol):
    """A runner whose positions may be rows of a learned table, behind which there is nothing."""

    @property
    def position_rows(self) -> int | None:
        """Longest sequence that the table serves; None: there is no table."""


@runtime_checkable
class Capturable(Protocol):
    """A runner whose decode steps may be recorded as CUDA graphs, if `capturable`.

    Such a step asks the device for nothing, and the host's lengths only bound what it does: their true values are those
    on the device.
    """

    @property
    def capturable(self) -> bool:
        """Whether this model on this device really is."""

    def reserve_positions(self, max_positions: int) -> None:
        """Tables by position stay where they are in memory from now on, for positions below `max_positions`."""
