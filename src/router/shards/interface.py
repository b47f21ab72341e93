"""What the scheduler sends to shards and gets, without gRPC; `pool.ShardPool` implements `Shards`."""

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
    """A call failed on a rank; `str(error)` is public."""

    def __init__(self, message: str, *, fatal: bool = False, unreachable: bool = False, detail: str = "") -> None:
        super().__init__(message)
        # No further call makes sense; else shards live without the named batches.
        self.fatal = fatal
        # The rank is known to be gone, and not only slow.
        self.unreachable = unreachable
        # For the operator, with addresses.
        self.detail = detail or message


class Asked(Protocol):
    """Shards of any kind."""

    async def health(self) -> None: ...


async def unreachable(shards: Asked) -> ShardError | None:
    """Return the error of a shard that is gone, if any."""
    try:
        await shards.health()
    except ShardError as error:
        return error if error.unreachable else None
    return None


class StalledError(ShardError):
    """The shards stopped answering."""

    def __init__(self, message: str, *, detail: str) -> None:
        super().__init__(message, fatal=True, detail=detail)


class UnsendableError(Exception):
    """Requests that cannot be sent: id -> why."""

    def __init__(self, reasons: dict[int, Exception]) -> None:
        super().__init__(f"{len(reasons)} requests cannot be sent to the shards")
        self.reasons = reasons


@dataclass(frozen=True, slots=True)
class StateRef:
    """What layers keep of a request beside its blocks: its slots."""

    slot: int
    # Slot of the state behind the first `cache_len` tokens.
    restored_from: int | None
    # (position, slot): copies behind so many tokens of the prompt.
    saves: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request with its KV place."""

    request_id: int
    request: ValidRequest
    blocks: Sequence[int] = ()
    # Leading tokens with KV.
    cache_len: int = 0
    # To run first; None: all.
    chunk_len: int | None = None
    # Generated before a preemption.
    resume_ids: Sequence[int] = ()
    state: StateRef | None = None


@dataclass(frozen=True, slots=True)
class BlockGrowth:
    """Blocks appended to a running request before the step."""

    request_id: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What one Prefill runs."""

    batch_id: int
    requests: Sequence[NewRequest]


@dataclass(frozen=True, slots=True)
class PrefillCall:
    """A new batch's prompts, perhaps joining running `cached_id`."""

    batch: NewBatch
    cached_id: int | None = None
    # Of the running batch's requests.
    new_blocks: Sequence[BlockGrowth] = ()
    # The next step's most prompt tokens; None: by warm-up.
    chunk_tokens: int | None = None
    # Calls whose ends are unknown.
    unanswered: int = 0


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """A step of the named batches, merged under the first id, with chunks; fields as `PrefillCall`."""

    batch_ids: Sequence[int]
    new_blocks: Sequence[BlockGrowth] = ()
    chunk_tokens: int | None = None
    unanswered: int = 0


@dataclass(frozen=True, slots=True)
class CachedBatch:
    """Which requests continue, in order."""

    batch_id: int
    request_ids: Sequence[int]
    max_tokens: int
    current_tokens: int


@dataclass(slots=True)
class Row:
    """A request's share: an error, or tokens and perhaps the end."""

    request_id: int
    tokens: Sequence[Token] = ()
    top_tokens: Sequence[tuple[Token, ...]] = ()
    prefill_tokens: tuple[Token, ...] | None = None
    prefill_top_tokens: PlacesTop = NO_PLACES
    ended: Ended | None = None
    error: str | None = None
    grammar_at_fault: bool = False
    overloaded: bool = False

    @property
    def is_server_at_fault(self) -> bool:
        """Whether it failed, and is not refused."""
        return self.error is not None and not (self.grammar_at_fault or self.overloaded)


@dataclass(slots=True)
class Ended:
    """The end with the row's last token."""

    text: str
    generated_tokens: int
    finish_reason: FinishReason
    seed: int | None


@dataclass(slots=True)
class Columns:
    """Plain rows as parallel lists."""

    request_ids: list[int]
    ids: list[int]
    logprobs: list[np.float32]
    texts: list[str]
    is_special: list[bool]


@dataclass(slots=True)
class Timings:
    """The slowest rank's seconds; `concat_s` None: nothing merged."""

    forward_s: float = 0.0
    decode_s: float = 0.0
    concat_s: float | None = None
    phases_s: tuple[float, ...] = ()  # in the order of `wire.step_phases.PHASES`


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a step drafted."""

    num_tokens: int
    # Of `num_tokens`.
    num_right: int
    longest: int
    # Drafted and right tokens by `DraftKind`.
    by_kind: tuple[tuple[int, int], ...] = ()
    # By request id, a prediction's right and wrong tokens.
    predicted: dict[int, tuple[int, int]] = field(default_factory=dict)

    def labelled(self) -> dict[str, tuple[int, int]]:
        """Return drafted and right tokens by label."""
        known = dict(zip(DRAFT_KINDS, self.by_kind, strict=False))
        num_tokens, num_right = (sum(counts) for counts in zip((0, 0), *known.values(), strict=True))
        return known | {OTHER_DRAFTS: (self.num_tokens - num_tokens, self.num_right - num_right)}


@dataclass(frozen=True, slots=True)
class EncodedImages:
    """A step's images: hits before, misses now."""

    hits: int
    misses: int
    encode_s: float


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Adapter slots: copies since the start, and used ones."""

    loads: int
    held: int


@dataclass(slots=True)
class StepReply:
    """A step's answer over all ranks; `batch` None: nothing continues."""

    rows: list[Row] = field(default_factory=list)
    columns: list[Columns] = field(default_factory=list)
    batch: CachedBatch | None = None
    timings: Timings = field(default_factory=Timings)
    drafted: Drafted | None = None
    images: EncodedImages | None = None
    adapter_slots: SlotUse | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was computed: the step was sent ahead of the answer by which all of its rows had ended."""
        return self.batch is None and not self.rows and not self.columns


class Shards(Protocol):
    """All shards as one; methods except `health` send at once in order, and return futures whose cancelling stops no
    device.
    """

    def prefill(self, call: PrefillCall) -> asyncio.Future[StepReply]:
        """Send a Prefill, or raise `UnsendableError`."""
        ...

    def probe(self) -> asyncio.Future[StepReply]:
        """Generate one token in block 0, as `PROBE_ID`."""
        ...

    def decode(self, call: DecodeCall) -> asyncio.Future[StepReply]: ...

    def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> asyncio.Future[CachedBatch | None]:
        """Keep only `request_ids`."""
        ...

    def clear_cache(self, batch_id: int) -> asyncio.Future[None]: ...

    async def health(self) -> None:
        """Ask every rank's device, outside of the order."""
        ...


PROBE_ID = 2**64 - 1  # batch and request id of the health probe
