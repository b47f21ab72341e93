"""What a step computed, for a feature that reads the model's hidden states."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model_server.batch.inputs import StepInputs
from model_server.batch.sequence import Sequence
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache
from model_server.memory.transfer import Staging
from model_server.runner.runner import Kept, ModelInputs, Runner


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """What a step computed of one request for good."""

    sequence: Sequence
    # Of the first of `count` tokens, rows from `first` on.
    position: int
    first: int
    count: int
    # From which the newest token was drawn, if any.
    logit_row: int | None


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A submitted step."""

    inputs: ModelInputs
    # Of its hidden states.
    kept: Kept | None
    # [n] int64 on the device: last drawn tokens in order, if any.
    newest: Tensor | None
    staging: Staging


class StepWatcher(Protocol):
    """Sees steps, alike on all ranks, on the device thread."""

    # It must see the steps of the engine (`on_step`).
    watches: bool

    def bytes_beside(self, max_length: int) -> int:
        """Return device memory beside the model's."""

    def measure(self, runner: Runner, cache: KvCache, world: ProcessGroup, max_length: int) -> None:
        """Measure what steps cost; overwrites the cache."""

    def retains(self) -> Kept | None:
        """Return what the next step must keep, if anything."""

    def retains_plain(self, rows: list[Sequence]) -> Kept | None:
        """Return what a step of single tokens must keep."""

    def on_step(self, rows: list[ComputedRow], step: ComputedStep) -> None:
        """A step of the engine was submitted."""


def decoded_rows(rows: Rows[Sequence]) -> list[ComputedRow]:
    """Return the rows of a step of single tokens."""
    return [ComputedRow(one, one.cache_length, row, 1, row) for row, one in enumerate(rows)]


def ragged_rows(rows: Rows[Sequence], inputs: StepInputs) -> list[ComputedRow]:
    """Return the rows of a step with prompts."""
    sampled = iter(range(len(rows)) if inputs.sampled_host is None else inputs.sampled_host.tolist())
    found, first = [], 0
    for one, count in zip(rows, inputs.model.attention.query_lengths_host, strict=True):
        found.append(ComputedRow(one, one.cache_length, first, count, next(sampled) if one.samples else None))
        first += count
    return found
