"""An adapter merged into its base model: the weights of the model are read as W + scale * B @ A, rounded once.

Each rank merges the rows and columns that it reads, in float32 and in memory; nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from model_server.adapters.folder import Adapter, Pair
from model_server.errors import StartupError
from model_server.weights.reader import Place, Range, SafetensorsReader, WeightReader, copy_into

_WEIGHT = ".weight"


class MergedReader:
    """A `WeightReader` of the base model's tensors, those of the adapter's modules with its product added.

    tied: the modules of the embedding and the head. What the base model lacks of them is read as the other one: a head
    that the adapter changes is no longer tied.
    """

    def __init__(
        self,
        base: WeightReader,
        adapter: Adapter,
        opened: SafetensorsReader,
        *,
        tied: tuple[str, str],
        transposed: bool,
    ) -> None:
        """opened: the adapter's tensors. transposed: matrices other than `tied` are stored as [in, out]."""
        self._base = base
        self._adapter = adapter
        self._opened = opened
        self._tied = tied
        self._transposed = transposed
        embedding, head = (module + _WEIGHT for module in tied)
        self._others: Mapping[str, str] = {embedding: head, head: embedding}

    @property
    def dtype(self) -> torch.dtype:
        return self._base.dtype

    @property
    def device(self) -> torch.device:
        return self._base.device

    def has(self, name: str) -> bool:
        return self._base.has(self._stored_name(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(self._stored_name(name))

    def stored(self, name: str) -> str:
        return self._base.stored(self._stored_name(name))

    def raw(self, name: str, rows: Range | None = None, columns: Range | None = None) -> Tensor:
        return self._base.raw(name, rows, columns)

    def rows(self, name: str, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> Tensor:
        if self._pair(name) is None:
            return self._base.rows(self._stored_name(name), ranges, dtype)
        num_rows = sum(stop - start for start, stop in ranges)
        out = torch.empty((num_rows, *self.shape(name)[1:]), dtype=dtype or self.dtype, device=self.device)
        self.fill(out, name, ranges)
        return out

    def fill(
        self,
        out: Tensor,
        name: str,
        rows: Sequence[Range],
        columns: Range | None = None,
        *,
        index: int | None = None,
        place: Place = copy_into,
        unit: int = 1,
    ) -> None:
        stored, pair = self._stored_name(name), self._pair(name)
        if pair is None or index is not None:
            self._base.fill(out, stored, rows, columns, index=index, place=place, unit=unit)
            return
        merged = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self._base.fill(merged, stored, rows, columns)
        wanted = (0, self.shape(name)[1]) if columns is None else columns
        if pair.copy is not None:
            self._check_copy(pair.copy, rows, merged)
        is_transposed = self._transposed and name.removesuffix(_WEIGHT) not in self._tied
        if is_transposed:
            merged += product(self._adapter, self._opened, pair, [wanted], rows, out.device).t()
        else:
            merged += product(self._adapter, self._opened, pair, rows, [wanted], out.device)
        first = 0
        for start, stop in rows:
            last = first + stop - start
            place(out[first:last], merged[first:last])
            first = last

    def _check_copy(self, key: str, rows: Sequence[Range], weight: Tensor) -> None:
        """weight: these rows of the base model's, in float32."""
        if not torch.equal(self._opened.rows(key, rows).to(self.device, self.dtype), weight.to(self.dtype)):
            raise StartupError(
                f"LoRA adapter `{self._adapter.name}`: tensor {key:.200} replaces the base model's; only a copy of it "
                "is served"
            )

    def _pair(self, name: str) -> Pair | None:
        return self._adapter.pairs.get(name.removesuffix(_WEIGHT)) if name.endswith(_WEIGHT) else None

    def _stored_name(self, name: str) -> str:
        if name not in self._others or self._base.has(name):
            return name
        return self._others[name] if self._adapter.pairs.get(self._tied[1]) is not None else name


def product(
    adapter: Adapter,
    opened: SafetensorsReader,
    pair: Pair,
    outputs: Sequence[Range],
    inputs: Sequence[Range],
    device: torch.device,
) -> Tensor:
    """scale * B @ A of these rows and columns, [outputs, inputs] in float32 on `device`. opened: the adapter's tensors.

    Raises StartupError for numbers that are not finite.
    """
    b, whole = opened.rows(pair.b, outputs), opened.rows(pair.a, [(0, pair.rank)])
    a = torch.cat([whole[:, slice(*cut)] for cut in inputs], 1)
    for key, tensor in ((pair.a, a), (pair.b, b)):
        if not tensor.isfinite().all():
            raise StartupError(f"LoRA adapter `{adapter.name}`: tensor {key:.200} holds numbers that are not finite")
    return pair.scale * (b.to(device) @ a.to(device))
