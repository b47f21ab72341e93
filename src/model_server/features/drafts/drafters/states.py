"""Hidden states that a batch's rows draft from."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from model_server.batch.sequence import Sequence
from model_server.features.drafts.drafters.drafts import State, gathered
from model_server.memory.transfer import Staging


class RowStates:
    """A `RowDrafts` with the `State` of each row."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._states: tuple[Tensor, Tensor] | None = None  # [num_rows, hidden], and which rows have one

    def set_rows(self, rows: list[Sequence]) -> None:
        self._states = gathered([row.drafts_from for row in rows], self._staging)

    def select(self, kept: Tensor) -> None:
        if self._states is not None:
            self._states = self._states[0].index_select(0, kept), self._states[1].index_select(0, kept)

    def stop(self, places: Mapping[Sequence, int]) -> None:
        for sequence, row in places.items():
            if self._states is not None and sequence.drafts_from is not None:
                sequence.drafts_from = State(self._states[0], row)
