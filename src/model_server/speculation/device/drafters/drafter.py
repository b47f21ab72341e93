"""The one interface of drafters whose drafts the device makes without the host."""

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
    """What a sequence needs to be drafted for is in its `drafts_from`; None: it is not drafted for.

    is_lost_in_plain_steps: it cannot draft for rows of whose steps it has not seen all.
    """

    is_lost_in_plain_steps: bool

    @property
    def is_measured(self) -> bool:
        """Whether `seconds` can be asked for."""

    def measure(self, cache: KvCache, world: ProcessGroup) -> None:
        """Measure what drafting takes. What `cache`, of its layers, holds is overwritten."""

    def seconds(self, num_rows: int, length: int) -> float:
        """What drafts of so many tokens take, and seeing the step that checks them."""

    def keeps(self) -> Kept | None:
        """What a step of the model has to keep for it; None: nothing."""

    def saw(self, rows: Rows[ComputedRow], step: ComputedStep) -> None:
        """A step that is not a window of the device was submitted."""

    def can_draft(self, sequence: Sequence) -> bool:
        """Whether it knows enough of the request."""

    def begin(self, staging: Staging) -> RowDrafts:
        """For a batch whose windows begin."""
