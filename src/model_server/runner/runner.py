"""The interface of ways to run a model: a flattened batch in, logits out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.adapters.rows import AdapterRows
from model_server.adapters.slot_table import SlotTable
from model_server.attention.backend import AttentionBackend, AttentionStep
from model_server.attention.metadata import AttentionMetadata
from model_server.memory.kv_cache import KvCache, KvShape

# Tokens per block where blocks hold no memory, and are only counted.
STATE_BLOCK_SIZE = 16


class RequestState:
    """What a runner remembers of one request, made and freed with its sequence."""

    __slots__ = ("has_begun", "kept", "prompt_length", "restored_from", "saves", "slot")

    def __init__(
        self,
        prompt_length: int,
        slot: int = 0,
        restored_from: int | None = None,
        saves: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Take what recurrent layers need.

        Args:
            slot: Where their state is.
            restored_from: Slot of the state that its first forward continues; None: it begins with the first token.
            saves: (position, slot): where the state behind so many tokens is copied to.
        """
        self.prompt_length = prompt_length
        self.kept: Any = None
        self.slot = slot
        self.restored_from = restored_from
        self.saves = saves
        self.has_begun = False


@dataclass(slots=True)
class Kept:
    """Hidden states of one forward from which tokens are guessed."""

    # `final` is of every token, not only of those with logits.
    all_tokens: bool = False
    # [n, hidden], what the head reads.
    final: Tensor | None = None
    # [num_tokens, hidden] of each layer of `Decoder.keep_inputs`.
    inputs: tuple[Tensor, ...] = ()


class CrossStates(NamedTuple):
    """Hidden states for layers of cross attention."""

    # [n, hidden]
    rows: Tensor
    # Tiles that hold something; those behind them pad.
    num_tiles: int = 1


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One flattened forward."""

    input_ids: Tensor  # [num_tokens] int64
    # [num_tokens], or [3, num_tokens] for rotations in sections (time, height, width).
    positions: Tensor  # int64
    attention: AttentionMetadata
    # Token rows with logits, in order; None: all.
    logit_rows: Tensor | None  # [num_rows] int64
    # One per sequence, for runners that keep states.
    states: tuple[RequestState, ...] = ()
    # (first row, [n, hidden]) instead of the ids there.
    embeddings: tuple[tuple[int, Tensor], ...] = ()
    # (first row, [layers, n, hidden]), added behind the first layers.
    deep_embeddings: tuple[tuple[int, Tensor], ...] = ()
    # (row, what cross attention reads from there on).
    cross_states: tuple[tuple[int, CrossStates], ...] = ()
    # [num_tokens, hidden] of the stage before, which may be overwritten; None on the first.
    hidden: Tensor | None = None
    # Answers attention; None: the runner's backend.
    attention_step: AttentionStep | None = None
    # The same, as the host knows them.
    logit_rows_host: npt.NDArray[np.int64] | None = None
    # Which rows get which LoRA adapter; None: base model.
    adapters: AdapterRows | None = None
    # Takes hidden states, of the native decoder alone.
    kept: Kept | None = None
    token_types: Tensor | None = None  # [num_tokens] int64; None: all are 0
    # Where logits are wanted, [num_rows, vocab_size] float32; a runner that cannot write there returns other memory.
    output: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token's row of a tensor [num_tokens, width]."""

    width: int
    dtype: torch.dtype


class StateSlots(Protocol):
    """Slots of states."""

    slot_bytes: int

    @property
    def num_slots(self) -> int: ...

    def reserve(self, num_slots: int) -> None:
        """Have so many slots at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTraits:
    """What kind of runner a model has."""

    # The backend; None: the model brings its own, or has none.
    attention: AttentionBackend | None = None
    # Bound of a `RequestState` for each KV block; None: requests live in the paged cache.
    state_bytes: int | None = None
    # Tokens before the first generated one, where not the prompt (encoder-decoder).
    decoder_prefix: tuple[int, ...] | None = None
    # Decode steps may be captured: they ask the device for nothing, and the host's lengths are only bounds.
    capturable: bool = False
    # Slots of what recurrent layers keep of a request beside its blocks; None: they keep nothing. Blocks alone are then
    # not enough to continue from, and no draft is checked.
    recurrent: StateSlots | None = None
    # Steps with prompts may be captured between calls of attention: all else depends on the number of tokens.
    in_pieces: bool = True
    # Length of a learned table of positions, if any.
    position_rows: int | None = None
    # This rank's weights; None: not counted.
    weight_bytes: int | None = None
    # Loaded LoRA adapters; the place is the number.
    adapters: tuple[str, ...] = ()
    # Of the device's adapters; None: rows use them by number.
    slots: SlotTable | None = None
    # The residual stream from the stage before; None: the first stage.
    received: TokenRow | None = None
    # The residual stream for the stage after; None: it returns logits.
    passed_on: TokenRow | None = None

    @property
    def is_stage(self) -> bool:
        """Other ranks have other layers."""
        return self.received is not None or self.passed_on is not None

    @property
    def keeps_state(self) -> bool:
        """Whether requests live in their `RequestState`, not in the paged cache.

        Such a runner computes whole prompts: no chunks, shared prefixes or preemption. Blocks are only numbers, for
        budgets.
        """
        return self.state_bytes is not None

    @property
    def prefix_length(self) -> int:
        """Count the decoder's first tokens in blocks of its own (`wire.decoder_blocks`); 0: it has none."""
        return 0 if self.keeps_state or self.decoder_prefix is None else len(self.decoder_prefix)

    @property
    def recurrent_bytes(self) -> int:
        """Return the bytes of a slot of states."""
        return 0 if self.recurrent is None else self.recurrent.slot_bytes

    @property
    def continues_from_blocks(self) -> bool:
        """Whether blocks are all that is known of tokens."""
        return not self.keeps_state and not self.recurrent_bytes and self.decoder_prefix is None

    @property
    def block_size(self) -> int:
        return STATE_BLOCK_SIZE if self.attention is None else self.attention.block_size


class Runner(Protocol):
    """A loaded model on this rank."""

    @property
    def traits(self) -> RunnerTraits: ...

    @property
    def vocab_size(self) -> int:
        """Return the width of logits, perhaps beyond the tokenizer's."""

    @property
    def max_positions(self) -> int | None:
        """Return the longest sequence, if bounded."""

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        """Return what layers cache of a token on this rank."""

    def set_longest(self, longest: int) -> None:
        """Bound sequences, before any request."""

    def reserve_positions(self, max_positions: int) -> None:
        """Fix tables' addresses for positions below `max_positions`, before captures."""

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        """Write K and V into `cache`, and return logits [num_rows, vocab_size] float32, equal on every rank.

        A stage that is not the last returns the residual stream.
        """


@runtime_checkable
class CacheHolder(Protocol):
    """A runner that refers to the cache of its last forward."""

    def forget_cache(self) -> None:
        """Drop references to it."""
