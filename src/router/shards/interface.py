"""What the scheduler sends to the shards and what they answer, in the router's own types.

Knows neither gRPC nor protobuf, so that the scheduler (and its tests) need neither. `pool.ShardPool` is the real
implementation of `Shards`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from router.events import NO_PLACES, FinishReason, PlacesTop, Token
from router.request import ValidRequest
from wire.step_phases import DRAFT_KINDS, OTHER_DRAFTS


class ShardError(Exception):
    """A call failed on at least one rank. `str(error)` is the shard's message, which clients may see.

    fatal: the shard cannot be reached or its state is unknown, so no further call makes sense. Otherwise the shard
    lives on without the batches that the call named. detail: what the operator should read, with addresses.
    """

    def __init__(self, message: str, *, fatal: bool = False, detail: str = "") -> None:
        super().__init__(message)
        self.fatal = fatal
        self.detail = detail or message


class StalledError(ShardError):
    """The shards have work and answer nothing for too long: it will not get better."""

    def __init__(self, message: str, *, detail: str) -> None:
        super().__init__(message, fatal=True, detail=detail)


class UnsendableError(Exception):
    """Requests that cannot be put on the wire: id -> why."""

    def __init__(self, reasons: dict[int, Exception]) -> None:
        super().__init__(f"{len(reasons)} requests cannot be sent to the shards")
        self.reasons = reasons


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request with its place in the KV cache.

    cache_len: leading prompt tokens whose KV is present. chunk_len: prompt tokens to run first, None for all.
    resume_ids: tokens generated before the request was preempted.
    """

    request_id: int
    request: ValidRequest
    blocks: Sequence[int] = ()
    cache_len: int = 0
    chunk_len: int | None = None
    resume_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class BlockGrowth:
    """More blocks for a running request, appended to its table before the step runs."""

    request_id: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What one Prefill runs."""

    batch_id: int
    requests: Sequence[NewRequest]


@dataclass(frozen=True, slots=True)
class PrefillCall:
    """Run the prompts of a new batch; with `cached_id` in one step with that running batch, which it joins.

    new_blocks: for requests of the running batch. chunk_tokens: the most that the step after this one computes of
    prompts; None: what the warm-up allows. unanswered: calls in flight, whose ends of requests the caller does not
    know.
    """

    batch: NewBatch
    cached_id: int | None = None
    new_blocks: Sequence[BlockGrowth] = ()
    chunk_tokens: int | None = None
    unanswered: int = 0


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """One step of the named batches, which become one batch under the first id. Runs the next chunk of prompts.

    new_blocks, chunk_tokens, unanswered: as in `PrefillCall`.
    """

    batch_ids: Sequence[int]
    new_blocks: Sequence[BlockGrowth] = ()
    chunk_tokens: int | None = None
    unanswered: int = 0


@dataclass(frozen=True, slots=True)
class CachedBatch:
    """What the shards keep after a call: which requests continue, in batch order."""

    batch_id: int
    request_ids: Sequence[int]
    max_tokens: int
    current_tokens: int


@dataclass(slots=True)
class Row:
    """One request's share of a step: an error, or at least one token and perhaps the end."""

    request_id: int
    tokens: Sequence[Token] = ()
    top_tokens: Sequence[tuple[Token, ...]] = ()
    prefill_tokens: tuple[Token, ...] | None = None
    prefill_top_tokens: PlacesTop = NO_PLACES
    ended: Ended | None = None
    error: str | None = None


@dataclass(slots=True)
class Ended:
    """The request ended with the row's last token."""

    text: str
    generated_tokens: int
    finish_reason: FinishReason
    seed: int | None


@dataclass(slots=True)
class Columns:
    """Rows with one plain token each, as parallel lists."""

    request_ids: list[int]
    ids: list[int]
    logprobs: list[np.float32]
    texts: list[str]
    is_special: list[bool]


@dataclass(slots=True)
class Timings:
    """Of the slowest rank, in seconds. `concat_s` is None when nothing was merged."""

    forward_s: float = 0.0
    decode_s: float = 0.0
    concat_s: float | None = None
    phases_s: tuple[float, ...] = ()  # in the order of `wire.step_phases.PHASES`


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a step drafted (speculation). num_right: of `num_tokens`; longest: the longest draft; by_kind: drafted and
    right tokens by the place of a `DraftKind`, predicted: by
    request id, of those whose prediction guessed some of it, how many of these tokens were right and how many not."""

    num_tokens: int
    num_right: int
    longest: int
    by_kind: tuple[tuple[int, int], ...] = ()
    predicted: dict[int, tuple[int, int]] = field(default_factory=dict)

    def labelled(self) -> dict[str, tuple[int, int]]:
        """Drafted and right tokens by the label of what guessed them."""
        known = dict(zip(DRAFT_KINDS, self.by_kind, strict=False))
        num_tokens, num_right = (sum(counts) for counts in zip((0, 0), *known.values(), strict=True))
        return known | {OTHER_DRAFTS: (self.num_tokens - num_tokens, self.num_right - num_right)}


@dataclass(frozen=True, slots=True)
class EncodedImages:
    """The images that the prompts of a step needed: hits were encoded before, misses for this step."""

    hits: int
    misses: int
    encode_s: float


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Slots for adapters: copies into them since the shards' start, and how many have one."""

    loads: int
    held: int


@dataclass(slots=True)
class StepReply:
    """Answer of a Prefill or Decode, merged over the ranks. `batch` is None when nothing continues."""

    rows: list[Row] = field(default_factory=list)
    columns: list[Columns] = field(default_factory=list)
    batch: CachedBatch | None = None
    timings: Timings = field(default_factory=Timings)
    drafted: Drafted | None = None
    images: EncodedImages | None = None
    adapter_slots: SlotUse | None = None


class Shards(Protocol):
    """All shards as one.

    Every method but `health` sends at once and in order: when it returns, the call has its number, and the future will
    hold the answer of all ranks or a `ShardError`. Cancelling a future cancels no work on a device.
    """

    def prefill(self, call: PrefillCall) -> asyncio.Future[StepReply]:
        """Raises `UnsendableError`, with nothing sent, if some of the requests cannot be put on the wire."""
        ...

    def probe(self) -> asyncio.Future[StepReply]:
        """A generation of one token in the reserved block 0, under the batch id `PROBE_ID`."""
        ...

    def decode(self, call: DecodeCall) -> asyncio.Future[StepReply]: ...

    def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> asyncio.Future[CachedBatch | None]:
        """Keep only `request_ids`; None if none of them is left."""
        ...

    def clear_cache(self, batch_id: int) -> asyncio.Future[None]: ...

    async def health(self) -> None:
        """Ask every rank for its device, outside the order. Raises `ShardError`."""
        ...


PROBE_ID = 2**64 - 1  # batch and request id of the health probe
