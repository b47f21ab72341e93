"""The one interface of every way of running a model.

The engine hands over a flattened batch and gets logits; it never sees which family or which runner it talks to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from model_server.adapters.rows import AdapterRows
from model_server.adapters.slots.table import SlotTable
from model_server.attention.backend import AttentionBackend, AttentionStep
from model_server.attention.metadata import AttentionMetadata
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.vision.image import Encoded

# Tokens per block where blocks hold no memory, and are only counted.
STATE_BLOCK_SIZE = 16


class RequestState:
    """What a runner remembers of one request, beside or instead of the paged cache.

    It is made with the request's sequence and goes with it, however that leaves its batch.
    prompt_length: how many of the request's tokens are its prompt.
    """

    __slots__ = ("kept", "prompt_length")

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self.kept: Any = None


@dataclass(slots=True)
class Kept:
    """Hidden states of one forward that guess the next tokens, filled by the runner.

    all_tokens: `final` is of every token, not only of those whose logits are wanted. final: [n, hidden], what the head
    reads. inputs: of each layer that `Decoder.keep_inputs` was asked for, what it reads, [num_tokens, hidden].
    """

    all_tokens: bool = False
    final: Tensor | None = None
    inputs: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One flattened forward.

    positions: [num_tokens], or [3, num_tokens] for rotations in sections (time, height and width of an image).
    logit_rows: the token rows whose logits are wanted, in order; None: all.
    states: one for each sequence; only a runner that keeps states asks for them.
    embeddings: (first row, [n, hidden]) that take the place of what the ids there would give, without overlaps.
    deep_embeddings: (first row, [layers, n, hidden]), which are added to those rows behind the first layers.
    pictures: (row of an image token, its image), for layers of cross attention, which read the image from there on.
    hidden: [num_tokens, hidden], what the layers before this rank's have given, which may be overwritten; None where
    this rank has the first layer.
    attention_step: answers the calls of attention; None: the runner's own backend does.
    adapters: which rows get which LoRA adapter; None: all are the base model's.
    kept: takes hidden states, from the native decoder alone; None: none are wanted.
    """

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # int64
    attention: AttentionMetadata
    logit_rows: Tensor | None  # [num_rows] int64
    states: tuple[RequestState, ...] = ()
    embeddings: tuple[tuple[int, Tensor], ...] = ()
    deep_embeddings: tuple[tuple[int, Tensor], ...] = ()
    pictures: tuple[tuple[int, Encoded], ...] = ()
    hidden: Tensor | None = None
    attention_step: AttentionStep | None = None
    adapters: AdapterRows | None = None
    kept: Kept | None = None
    token_types: Tensor | None = None  # [num_tokens] int64; None: all are 0


@dataclass(frozen=True, slots=True)
class TokenRow:
    """What one token has in a tensor [num_tokens, width]."""

    width: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTraits:
    """What kind of runner a loaded model has, for those who must treat some differently.

    attention: the backend that serves it; None: it keeps a state for each request, and brings its own attention or has
    none.
    state_bytes: upper bound of the memory that a request's `RequestState` takes for each of its KV blocks; None: its
    requests live in the paged cache. image_reserve: tokens whose state takes as much as an image's part of it.
    decoder_prefix: the tokens before the first generated one where that is not the prompt (encoder-decoder).
    capturable: decode steps may be captured as CUDA graphs. Such a step asks the device for nothing, and the host's
    lengths only bound what it does: their true values are those on the device.
    recurrent_bytes: what layers keep of a request in its `RequestState`, beside its blocks in the paged cache. Prompts
    are chunked as elsewhere; but the blocks alone are not enough to continue from: no prefix is shared, and no draft is
    checked.
    in_pieces: of steps with prompts what is between two calls of attention may be captured: it depends on the number of
    tokens alone.
    position_rows: longest sequence that a learned table of positions serves; None: there is no table.
    weight_bytes: what this rank's weights take; None: not counted.
    adapters: names of the LoRA adapters that are loaded; the place of one is its number.
    slots: of the device, for adapters; None: rows have them where they were loaded, by number.
    received: the residual stream that comes from the stage before; None: this is the first stage. passed_on: the one
    that the forward returns, for the stage after; None: it returns logits.
    """

    attention: AttentionBackend | None = None
    state_bytes: int | None = None
    image_reserve: int = 0
    decoder_prefix: tuple[int, ...] | None = None
    capturable: bool = False
    recurrent_bytes: int = 0
    in_pieces: bool = True
    position_rows: int | None = None
    weight_bytes: int | None = None
    adapters: tuple[str, ...] = ()
    slots: SlotTable | None = None
    received: TokenRow | None = None
    passed_on: TokenRow | None = None

    @property
    def is_stage(self) -> bool:
        """Other ranks have other layers."""
        return self.received is not None or self.passed_on is not None

    @property
    def keeps_state(self) -> bool:
        """Its requests live in their `RequestState`, not in the paged cache (its `kv_shapes` are empty).

        Such a runner computes a prompt in one forward, from its beginning: no chunks, no shared prefixes, no
        preemption. Blocks are still handed out for such requests, so that budgets hold, but they are numbers only.
        """
        return self.state_bytes is not None

    @property
    def continues_from_blocks(self) -> bool:
        """The blocks of a request's tokens are all that is known of them."""
        return not self.keeps_state and not self.recurrent_bytes

    @property
    def block_size(self) -> int:
        """Tokens per KV block that suit the runner."""
        return STATE_BLOCK_SIZE if self.attention is None else self.attention.block_size


class Runner(Protocol):
    """A loaded model on this rank."""

    @property
    def traits(self) -> RunnerTraits: ...

    @property
    def vocab_size(self) -> int:
        """Width of the logits, which may exceed the tokenizer's vocabulary."""

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the positions allow; None if unbounded."""

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        """Per layer, what one token's K and V take on this rank."""

    def set_longest(self, longest: int) -> None:
        """No sequence will be longer than that many tokens: before any request comes."""

    def reserve_positions(self, max_positions: int) -> None:
        """Before steps are captured: tables by position stay where they are in memory from now on, for positions below
        `max_positions`."""

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        """Write the step's K/V into `cache` and return logits [num_rows, vocab_size] float32, equal on every rank; on a
        stage that is not the last the residual stream, as `RunnerTraits.passed_on` says."""
