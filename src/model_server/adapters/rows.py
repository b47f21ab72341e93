"""Which rows of a forward get which adapter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.memory.transfer import upload

# Rows one after another, or [n] int64.
RowIndex = slice | Tensor
Groups = tuple[tuple[int, RowIndex], ...]

BASE = -1
"""In place of an adapter's number: the base model."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """groups: adapters by their number, each with its rows among all tokens. kept: the same among the rows that
    continue after the last attention, which are in the order of the tokens. numbers, kept_numbers: of the adapter of
    each of these rows, or BASE; int64 in host memory."""

    groups: Groups
    kept: Groups
    numbers: Tensor
    kept_numbers: Tensor

    def among(self, num_rows: int) -> Groups:
        """The groups of all tokens or of the kept rows, whichever `num_rows` is: equal numbers mean equal rows."""
        return self.kept if num_rows == len(self.kept_numbers) else self.groups

    def numbers_among(self, num_rows: int) -> Tensor:
        """The same as a number for each row."""
        return self.kept_numbers if num_rows == len(self.kept_numbers) else self.numbers


@dataclass(slots=True)
class CurrentRows:
    """The rows of the forward that runs. The decoder sets them, and its linear layers read them; None: base only."""

    rows: AdapterRows | None = None


def adapter_rows(
    numbers: npt.NDArray[np.int64], kept: npt.NDArray[np.int64] | None, device: torch.device
) -> AdapterRows | None:
    """numbers: of the adapter of each token, or BASE. kept: the rows that continue, ascending; None: all.

    None: every row is the base model's.
    """
    if (numbers == BASE).all():
        return None
    groups = _groups(numbers, device)
    of_tokens = torch.from_numpy(numbers.astype(np.int64))
    if kept is None:
        return AdapterRows(groups, groups, of_tokens, of_tokens)
    return AdapterRows(groups, _groups(numbers[kept], device), of_tokens, of_tokens[torch.from_numpy(kept)])


def _groups(numbers: npt.NDArray[np.int64], device: torch.device) -> Groups:
    found: list[tuple[int, RowIndex]] = []
    for number in np.unique(numbers).tolist():
        if number == BASE:
            continue
        rows = np.flatnonzero(numbers == number)
        first, last = int(rows[0]), int(rows[-1]) + 1
        whole = last - first == len(rows)
        found.append((number, slice(first, last) if whole else upload(torch.from_numpy(rows), device)))
    return tuple(found)
