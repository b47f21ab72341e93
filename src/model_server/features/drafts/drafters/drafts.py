"""What guesses on the device: by text here, by computing in `drafters`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.batch.sequence import Sequence
from model_server.features.drafts.drafters.lookup import LookUp
from model_server.features.drafts.drafters.queries import RowsAt
from model_server.memory.transfer import Staging
from model_server.runner.runner import Kept


@dataclass(frozen=True, slots=True)
class Brought:
    """What a window brought."""

    # [num_rows, num_places] int64, of which each row takes `got` [num_rows] int64.
    drawn: Tensor
    got: Tensor
    # Of its forward.
    kept: Kept | None
    # [num_rows, num_places] int64: places in the cache.
    stored: Tensor
    # The queries' metadata.
    attention: AttentionMetadata


class RowDrafts(Protocol):
    """Drafts of one batch while windows continue, without waiting."""

    def set_rows(self, rows: list[Sequence]) -> None:
        """Windows of these rows begin."""

    def select(self, kept: Tensor) -> None:
        """The rows at `kept` [n] int64 alone."""

    def stop(self, places: Mapping[Sequence, int]) -> None:
        """End before another step than a window."""

    def draft(self, rows: RowsAt, length: int, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return tokens [num_rows, `length` or more] int64, and how many are each row's draft.

        Args:
            forced: [num_rows, `length`] int64, tokens that are drafted whatever would be guessed, or -1.
        """

    def apply(self, brought: Brought) -> None:
        """The window is computed."""


class LookedUp:
    """Drafts from the rows' own text."""

    def __init__(self, look_up: LookUp, most: int) -> None:
        self._look_up = look_up
        self._most = most

    def set_rows(self, rows: list[Sequence]) -> None: ...

    def select(self, kept: Tensor) -> None: ...

    def stop(self, places: Mapping[Sequence, int]) -> None: ...

    def draft(self, rows: RowsAt, length: int, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._look_up(rows.history, rows.start + 1, self._most)

    def apply(self, brought: Brought) -> None: ...


class State(NamedTuple):
    """A row of a shared tensor."""

    tensor: Tensor
    row: int


def gathered(states: list[State | None], staging: Staging) -> tuple[Tensor, Tensor] | None:
    """Return states [num_rows, ...], and which rows have one; None if none has."""
    offsets: dict[int, int] = {}
    parts: list[Tensor] = []
    index = np.zeros(len(states), np.int64)
    for place, state in enumerate(states):
        if state is None:
            continue
        if id(state.tensor) not in offsets:
            offsets[id(state.tensor)] = sum(map(len, parts))
            parts.append(state.tensor)
        index[place] = offsets[id(state.tensor)] + state.row
    if not parts:
        return None
    known = np.array([state is not None for state in states])
    picked, has_state = staging.upload(index, known)
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).index_select(0, picked), has_state


def last_of(values: Tensor, got: Tensor, before: Tensor) -> Tensor:
    """Return each row's value at its last token, or `before` [num_rows, n] without one."""
    place = (got - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, values.shape[2])
    return torch.where((got > 0)[:, None], values.gather(1, place).squeeze(1), before)


def no_drafts(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(count, 1, dtype=torch.int64, device=device), torch.zeros(count, dtype=torch.int64, device=device)


def forced_or(guessed: Tensor, forced: Tensor | None, place: int) -> Tensor:
    """Return `guessed` [num_rows] int64, or the tokens that `RowDrafts.draft` is given for this place."""
    return guessed if forced is None else torch.where(forced[:, place] < 0, guessed, forced[:, place])
