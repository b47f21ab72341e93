"""A `WeightReader` over tensors in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.weights.reader import Range


class DictReader:
    """A checkpoint in memory."""

    dtype = torch.float32

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise StartupError(f"weight {name} does not exist")
        return tuple(self.tensors[name].shape)

    def rows(self, name: str, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> Tensor:
        rows = torch.cat([self.tensors[name][a:b] for a, b in ranges])
        return rows if dtype is None else rows.to(dtype)

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        return self.tensors[name][:, start:stop]

    def stacked(self, name: str, index: int, rows: Range, columns: Range) -> Tensor:
        return self.tensors[name][index, slice(*rows), slice(*columns)]

    def rows_into(
        self, out: Tensor, name: str, ranges: Sequence[Range], *, place: Any = Tensor.copy_, unit: int = 1
    ) -> None:
        place(out, self.rows(name, ranges))

    def columns_into(self, out: Tensor, name: str, start: int, stop: int) -> None:
        out.copy_(self.columns(name, start, stop))
