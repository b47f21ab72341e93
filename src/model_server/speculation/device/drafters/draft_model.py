"""A draft model, which computes missing keys when it drafts next."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from model_server.batch.sequence import Sequence
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache
from model_server.memory.transfer import Staging
from model_server.runner.runner import Kept
from model_server.speculation.device.drafts import Brought, RowDrafts, no_drafts
from model_server.speculation.device.queries import RowsAt, single_queries
from model_server.speculation.drafters.draft_model import DraftModel
from model_server.speculation.drafters.drafter import ComputedRow, ComputedStep

# Tokens of all rows that one forward computes where keys are behind by many.
_MOST_TOKENS = 2048


class DeviceDraftModel:
    """A `DeviceDrafter`; `Sequence.drafts_from` counts tokens before the newest that may lack keys."""

    is_lost_in_plain_steps = False

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    @property
    def is_measured(self) -> bool:
        return self._model.pace is not None

    def measure(self, cache: KvCache, world: ProcessGroup) -> None:
        self._model.measure(cache, world)

    def seconds(self, num_rows: int, length: int) -> float:
        pace = self._model.pace
        assert pace is not None
        return 0.0 if not length else pace.cost(2 * num_rows) + (length - 1) * pace.cost(num_rows)

    def retains(self) -> Kept | None:
        return None

    def on_step(self, rows: Rows[ComputedRow], step: ComputedStep) -> None:
        """Prompts are computed in `DraftModel.follow`."""
        for row in rows:
            one = row.sequence
            one.drafts_from = 0 if one.is_prefilling or one.drafts_from is None else one.drafts_from + row.count

    def can_draft(self, sequence: Sequence) -> bool:
        return sequence.drafts_from is not None

    def start(self, staging: Staging) -> RowDrafts:
        return ModelDrafts(self._model)


class ModelDrafts:
    """A `RowDrafts`; keys may be computed again where other rows lack theirs."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._behind = 1  # the most that any row is
        self._length = 0  # of the draft that is checked

    def set_rows(self, rows: list[Sequence]) -> None:
        self._behind = max((row.drafts_from for row in rows if row.drafts_from is not None), default=1)

    def select(self, kept: Tensor) -> None:
        """All rows are behind alike."""

    def stop(self, places: Mapping[Sequence, int]) -> None:
        for sequence in places:
            sequence.drafts_from = self._behind

    def draft(self, rows: RowsAt, length: int) -> tuple[Tensor, Tensor]:
        self._length = length
        if not length:
            return no_drafts(rows.count, rows.start.device)
        found = [self._newest(rows)]
        for place in range(1, length):
            at = (rows.start + place)[:, None]
            stored, attention = single_queries(rows, at, at < rows.limit[:, None], place)
            found.append(self._model.likeliest(found[-1], stored.view(-1), attention))
        return torch.stack(found, 1), torch.full_like(rows.start, length)

    def apply(self, brought: Brought) -> None:
        """Note that a draft's last token, before the newest if all were right, has no keys."""
        self._behind = 1 if self._length else self._behind + 1

    def _newest(self, rows: RowsAt) -> Tensor:
        """Compute what lacks keys; return the likeliest next token, [num_rows] int64."""
        device, first = rows.start.device, -self._behind
        part = max(1, _MOST_TOKENS // rows.count)
        while True:
            stop = min(1, first + part)
            at = rows.start[:, None] + torch.arange(first, stop, device=device)
            inside = (at >= 0) & (at < rows.limit[:, None])
            ids = rows.history.gather(1, at.clamp(min=0)).long()
            stored, attention = single_queries(rows, at, inside, first)
            last = None
            if stop - first > 2:
                last = torch.arange(1, rows.count + 1, device=device) * (stop - first) - 1
            found = self._model.likeliest(ids.view(-1), stored.view(-1), attention, last)
            if stop == 1:
                return found if last is not None else found.view(rows.count, -1)[:, -1]
            first = stop
