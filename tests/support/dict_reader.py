"""A `WeightReader` over tensors in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.weights.reader import Range

# As safetensors names the types that tests store codes and scales in.
STORED = {
    torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0", torch.bfloat16: "BF16", torch.float16: "F16",
}  # fmt: skip


class DictReader:
    """A checkpoint in memory."""

    dtype = torch.float32

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.device = next((t.device for t in tensors.values()), torch.device("cpu"))

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise StartupError(f"weight {name} does not exist")
        return tuple(self.tensors[name].shape)

    def stored(self, name: str) -> str:
        self.shape(name)
        return STORED.get(self.tensors[name].dtype, "F32")

    def raw(self, name: str, rows: Range | None = None, columns: Range | None = None) -> Tensor:
        self.shape(name)
        cuts = [slice(*cut) for cut in (rows, columns) if cut is not None]
        return self.tensors[name][tuple(cuts) or ...].clone()

    def skip(self, *names: str) -> None:
        pass

    def rows(self, name: str, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> Tensor:
        rows = torch.cat([self.tensors[name][a:b] for a, b in ranges])
        return rows if dtype is None else rows.to(dtype)

    def fill(
        self, out: Tensor, name: str, rows: Sequence[Range], columns: Range | None = None, *,
        index: int | None = None, place: Any = Tensor.copy_, unit: int = 1,
    ) -> None:  # fmt: skip
        whole = self.tensors[name] if index is None else self.tensors[name][index]
        chosen = torch.cat([whole[a:b] for a, b in rows])
        place(out, chosen if columns is None else chosen[:, slice(*columns)])
