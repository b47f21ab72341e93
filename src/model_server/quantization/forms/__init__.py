"""Forms of a weight matrix in memory, between file formats and products."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor


class Form(Protocol):
    """A matrix [out, in], however it is kept."""

    @property
    def shape(self) -> tuple[int, int]:
        """out, in."""

    @property
    def nbytes(self) -> int:
        """The memory that it takes, scales included."""

    @property
    def kind(self) -> str | None:
        """Return a name for the log; None: plain."""

    def rows(self, start: int, stop: int) -> Form:
        """Return rows [start, stop), perhaps in shared memory."""

    def permuted(self, rows: Tensor) -> Form:
        """Return the rows `rows` [n] int64."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in floating point, perhaps in shared memory, not to be written."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Floating-point numbers [out, in]."""

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def kind(self) -> None:
        return None

    def rows(self, start: int, stop: int) -> Plain:
        return Plain(self.weight[start:stop])

    def permuted(self, rows: Tensor) -> Plain:
        return Plain(self.weight.index_select(0, rows))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)


@dataclass(frozen=True, slots=True)
class Stacked:
    """Matrices of the same inputs, kept in different ways."""

    forms: tuple[Form, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(form.shape[0] for form in self.forms), self.forms[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(form.nbytes for form in self.forms)

    @property
    def kind(self) -> str | None:
        return next((form.kind for form in self.forms if form.kind is not None), None)

    def rows(self, start: int, stop: int) -> Form:
        kept = []
        for form, last in zip(self.forms, self._ends(), strict=True):
            first = last - form.shape[0]
            if max(first, start) < min(last, stop):
                kept.append(form.rows(max(first, start) - first, min(last, stop) - first))
        return stacked(kept)

    def permuted(self, rows: Tensor) -> Form:
        ends = torch.tensor(self._ends(), device=rows.device)
        owners, counts = torch.unique_consecutive(torch.bucketize(rows, ends, right=True), return_counts=True)
        starts = [0, *self._ends()]
        runs = zip(owners.tolist(), torch.split(rows, counts.tolist()), strict=True)
        return stacked(self.forms[owner].permuted(run - starts[owner]) for owner, run in runs)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([form.dequantize(dtype) for form in self.forms])

    def _ends(self) -> list[int]:
        return list(accumulate(form.shape[0] for form in self.forms))


def stacked(forms: Iterable[Form]) -> Form:
    """Stack forms unmerged."""
    flat: list[Form] = []
    for form in forms:
        flat.extend(form.forms if isinstance(form, Stacked) else (form,))
    return flat[0] if len(flat) == 1 else Stacked(tuple(flat))
