"""Steps that a feature makes for rows that decode, where the engine would make a `DecodeStep`."""

# Not in a pipeline of several stages, which pass on what one step of each row computes.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from model_server.batch.decode_state import DecodeState
from model_server.batch.newest import NewestTokens
from model_server.batch.sequence import Sequence
from model_server.engine.steps.context import StepContext, StepTimes
from model_server.engine.steps.step import Step
from model_server.engine.steps.watcher import StepWatcher


class BatchSteps(Protocol):
    """The feature's steps of one batch."""

    # On what was looked at for the decode step behind `next` that returned None.
    reports: tuple[object, ...]

    @property
    def has_run(self) -> bool:
        """A step was made."""

    def may_follow(self, rows: list[Sequence]) -> bool:
        """Whether the next step, of `rows` if it decodes, may precede the last one's tokens."""

    def next(self, rows: list[Sequence], times: StepTimes, newest: NewestTokens | None) -> Step | None:
        """Return the next step, or None for a `DecodeStep`."""

    def note_other_step(self) -> None:
        """Note that rows move on in another step."""

    def release(self, kept: list[Sequence]) -> None:
        """Forget sequences that leave."""


@dataclass(frozen=True, slots=True)
class StepMaker:
    """A feature that makes steps."""

    watcher: StepWatcher
    of_batch: Callable[[StepContext, DecodeState], BatchSteps]
