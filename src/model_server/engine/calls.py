"""What the router asks of the engine: the session that a warm-up begins, and the arguments of each step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from model_server.batch.extension import BlockExtension
from wire.extensions import Extension

_UNBOUNDED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a router and this shard agreed at warm-up; it holds until the next warm-up. Before the first one: TGI's own
    router, and no bound on prompts.

    extensions: those that the router uses. max_prefill_tokens: the most tokens of a step with chunks of prompts.
    """

    extensions: frozenset[Extension] = frozenset()
    max_prefill_tokens: int = _UNBOUNDED

    @cached_property
    def upstream_router(self) -> bool:
        """TGI's own router: a request that ended stays listed in its batch until it is filtered, and an error in one
        row fails its whole step."""
        return not {Extension.RUN_AHEAD, Extension.ROW_ERRORS} <= self.extensions

    @cached_property
    def extends_blocks(self) -> bool:
        """Requests get their KV blocks as they need them, not all at their start."""
        return Extension.GROW in self.extensions

    @cached_property
    def column_tokens(self) -> int:
        """Rows with plain tokens are answered as packed arrays if they have at most this many."""
        if Extension.COLUMNS not in self.extensions:
            return 0
        return _UNBOUNDED if Extension.WINDOWS in self.extensions else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """Arguments that Prefill and Decode share.

    sequence: the call's number in the router's order; None: a router that does not number its calls. With a number, a
    batch (or a request in `extensions`) that is not here has ended normally and is skipped; without, it is an error.
    unanswered: calls before this one that the router had no answer of when it sent it.
    extensions: blocks for running requests, appended before the forward. chunk_tokens: the most that the step after
    this one computes of prompts; None: what fits.
    """

    sequence: int | None = None
    unanswered: int = 0
    extensions: tuple[BlockExtension, ...] = ()
    chunk_tokens: int | None = None

    @property
    def numbered(self) -> bool:
        return self.sequence is not None

    def follows_answer_of(self, number: int) -> bool:
        """Whether the router had the answer of the call with this number when it sent this one."""
        return self.sequence is None or number < self.sequence - self.unanswered


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCall(StepCall):
    """A new batch. cached_id: a running batch that its requests join."""

    batch_id: int
    cached_id: int | None = None

    @property
    def continued(self) -> tuple[int, ...]:
        """The running batches whose next step it runs."""
        return () if self.cached_id is None else (self.cached_id,)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCall(StepCall):
    """The next step of these batches, merged into the first."""

    batch_ids: tuple[int, ...]

    @property
    def continued(self) -> tuple[int, ...]:
        """As in `PrefillCall`."""
        return self.batch_ids
