"""What guesses the next tokens of a batch on the device: by its own text here, by what computes in `drafters`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.batch.sequence import Sequence
from model_server.memory.transfer import Staging
from model_server.runner.runner import Kept
from model_server.speculation.device.lookup import LookUp
from model_server.speculation.device.queries import RowsAt


@dataclass(frozen=True, slots=True)
class Brought:
    """What a window brought. drawn: [num_rows, num_places] int64; got: [num_rows] int64, how many of them each row
    takes. kept: of its forward; stored: [num_rows, num_places] int64, the queries' places in the cache; attention:
    their metadata."""

    drawn: Tensor
    got: Tensor
    kept: Kept | None
    stored: Tensor
    attention: AttentionMetadata


class RowDrafts(Protocol):
    """Of one batch, while windows follow each other; waits for nothing."""

    def take(self, rows: list[Sequence]) -> None:
        """Windows of these rows begin."""

    def select(self, kept: Tensor) -> None:
        """The rows at `kept` [n] int64 alone."""

    def leave(self, places: Mapping[Sequence, int]) -> None:
        """Another step than a window comes; where its rows are."""

    def draft(self, rows: RowsAt, length: int) -> tuple[Tensor, Tensor]:
        """[num_rows, `length` or more] int64, 1 at least, and how many tokens of it are each row's draft. length: the
        most that are checked; 0: none are."""

    def settle(self, brought: Brought) -> None:
        """The window is computed."""


class LookedUp:
    """Drafts from the rows' own text."""

    def __init__(self, look_up: LookUp, most: int) -> None:
        self._look_up = look_up
        self._most = most

    def take(self, rows: list[Sequence]) -> None:
        """It keeps nothing."""

    def select(self, kept: Tensor) -> None:
        """It keeps nothing."""

    def leave(self, places: Mapping[Sequence, int]) -> None:
        """It keeps nothing."""

    def draft(self, rows: RowsAt, length: int) -> tuple[Tensor, Tensor]:
        return self._look_up(rows.history, rows.start + 1, self._most)

    def settle(self, brought: Brought) -> None:
        """It keeps nothing."""


class State(NamedTuple):
    """A row of a tensor that several sequences have in common."""

    tensor: Tensor
    row: int


def gathered(states: list[State | None], staging: Staging) -> tuple[Tensor, Tensor] | None:
    """[num_rows, ...] of them, whatever there is where one is None, and which rows have one, [num_rows] bool; None if
    no row has."""
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
    """Of `values` [num_rows, num_places, n] each row's at its last token, of rows that got none what was `before`
    [num_rows, n]."""
    place = (got - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, values.shape[2])
    return torch.where((got > 0)[:, None], values.gather(1, place).squeeze(1), before)


def no_drafts(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of so many rows."""
    return torch.zeros(count, 1, dtype=torch.int64, device=device), torch.zeros(count, dtype=torch.int64, device=device)
