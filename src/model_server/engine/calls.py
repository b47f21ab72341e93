"""What the router asks of the engine: a warm-up's session, and the arguments of each step."""

from __future__ import annotations

from dataclasses import dataclass

from model_server.batch.growth import BlockGrowth

_UNBOUNDED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a router asked for, until the next warm-up."""

    # The most tokens of a step with chunks of prompts. Before the first warm-up there is no bound.
    max_prefill_tokens: int = _UNBOUNDED


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """Arguments that Prefill and Decode share."""

    # The call's number in the router's order. A batch, or a request in `new_blocks`, that is not here has ended
    # normally and is skipped.
    sequence: int
    # Calls before this one that the router had no answer of when it sent it.
    unanswered: int = 0
    # For running requests, appended before the forward.
    new_blocks: tuple[BlockGrowth, ...] = ()
    # The most that the step after this one computes of prompts; None: what fits.
    chunk_tokens: int | None = None

    def follows_answer_of(self, number: int) -> bool:
        """Whether the router had that call's answer when it sent this."""
        return number < self.sequence - self.unanswered


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCall(StepCall):
    """A new batch; its requests join the running `cached_id`."""

    batch_id: int
    cached_id: int | None = None

    @property
    def continued(self) -> tuple[int, ...]:
        return () if self.cached_id is None else (self.cached_id,)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCall(StepCall):
    """The next step of these batches, merged into the first."""

    batch_ids: tuple[int, ...]

    @property
    def continued(self) -> tuple[int, ...]:
        return self.batch_ids
