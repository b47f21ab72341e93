"""The interface of drafters ahead of the host."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

from model_server.batch.sequence import Sequence
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache
from model_server.memory.transfer import Staging
from model_server.runner.runner import Kept
from model_server.speculation.device.drafts import RowDrafts
from model_server.speculation.drafters.drafter import ComputedRow, ComputedStep


class DeviceDrafter(Protocol):
    """Drafts for sequences with `drafts_from`."""

    # It must see all steps of its rows.
    is_lost_in_plain_steps: bool

    @property
    def is_measured(self) -> bool:
        """Whether `seconds` can be asked for."""

    def measure(self, cache: KvCache, world: ProcessGroup) -> None:
        """Measure drafting; overwrites `cache`."""

    def seconds(self, num_rows: int, length: int) -> float:
        """Return the time of drafts, and of seeing the step that checks them."""

    def retains(self) -> Kept | None:
        """Return what a step must keep for it, if anything."""

    def on_step(self, rows: Rows[ComputedRow], step: ComputedStep) -> None:
        """Note a submitted step that is not a window."""

    def can_draft(self, sequence: Sequence) -> bool:
        """Whether it knows enough of the request."""

    def start(self, staging: Staging) -> RowDrafts:
        """For a batch whose windows begin."""
