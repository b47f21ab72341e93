"""Reads this rank's part of LoRA matrices, one product at a time. DoRA's lengths come from the base model's files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model_server.adapters.factors import EmbeddingFactors, Factors, HeadRows, TableRows, joined
from model_server.adapters.folder import Adapter, NewRows, Pair
from model_server.memory.huge_pages import Arena
from model_server.weights.matrix import Part
from model_server.weights.products import ExpertRows, HeadTable, Product, Table
from model_server.weights.reader import Range, SafetensorsReader
from wire.adapters import MAX_NEW_ROWS

# Rows of a vocabulary at a time.
_CHUNK = 2**14
# Of all experts: those of one layer, whose experts are read one after the other.
_KEPT_PARAMETERS = 2
# What a copy of a table may differ from its quantized numbers, relative to these: those of 4 bits differ by about 0.08,
# those of another model by more than 1.
_MOST_ROUNDING = 0.2


class AdapterReader:
    """Reads one adapter's tensors in float32 on the host; packs into `memory`."""

    def __init__(self, adapter: Adapter, opened: SafetensorsReader, dtype: torch.dtype, device: torch.device) -> None:
        self._adapter = adapter
        self._opened = opened
        self._dtype = dtype
        self._device = device
        self.memory = Arena(adapter.num_kept * dtype.itemsize)
        self._experts: dict[str, tuple[Tensor, Tensor]] = {}  # the last parameters of all experts

    def product(self, product: Product) -> Factors | None:
        """Read what it adds to this product, if anything."""
        pairs = self._adapter.pairs
        modules: list[tuple[Tensor, Tensor, int]] = []
        inner: dict[str, Tensor] = {}
        start = 0
        for part in product.parts:
            if part.name in pairs:
                if part.name not in inner:
                    inner[part.name] = self._a(part.name, product.columns)
                modules.append((inner[part.name], self._b(part), start))
            start += part.num_kept
        if product.expert is not None and product.expert.name in pairs:
            if modules:
                raise self._adapter.error(f"{product.expert.name} beside matrices of single experts is not served")
            return joined([(*self._of_expert(product.expert, product.columns), 0)])
        if not modules:
            return None
        gain = self._gain(product, start)
        return joined(modules, gain, self._shift(product, start, gain))

    def embedding(self, table: Table) -> EmbeddingFactors | None:
        """Read what it changes of the embedding, if anything."""
        pair, new = self._adapter.pairs.get(table.module), self._adapter.rows.get(table.module)
        if pair is not None:
            return self._embedding_pair(pair, table)
        return None if new is None else EmbeddingFactors(rows=self._new_rows(new, table))

    def head(self, head: HeadTable) -> HeadRows | None:
        """Read its rows of the head on this rank; None if it has none on any.

        Raises:
            StartupError: A saved matrix is not the copy it should be.
        """
        table, (start, stop) = head.table, head.rows
        pair, new = self._adapter.pairs.get(table.module), self._adapter.rows.get(table.module)
        if pair is not None and pair.copy is not None:
            self._check_copy(pair.copy, table)
        shared = None if head.tied_to is None else self._adapter.rows.get(head.tied_to)
        if new is None and shared is not None and shared.ids is not None:
            new = shared
        if new is None:
            return None
        replaced = self._new_rows(new, table)
        if not len(replaced.ids):
            return None
        own = (replaced.ids >= start) & (replaced.ids < stop)
        places = replaced.ids[own] - start
        bias = None if head.bias is None else head.bias.to(self._device)[places]
        return HeadRows(places, replaced.weight[own], bias)

    def _gain(self, product: Product, outputs: int) -> Tensor | None:
        """Return the wanted lengths of rows of W + scale * B @ A over the present ones."""
        pairs = self._adapter.pairs
        if not any(part.name in pairs and pairs[part.name].magnitude is not None for part in product.parts):
            return None
        weight = product.weight()
        gain = torch.ones(outputs, dtype=torch.float32, device=weight.device)
        start = 0
        for part in product.parts:
            stop = start + part.num_kept
            pair = pairs.get(part.name)
            if pair is not None and pair.magnitude is not None:
                a = self._read(pair.a, [(0, pair.rank)]).to(weight.device)
                b = self._ordered(part, self._read(pair.b, part.rows)).to(weight.device)
                wanted = self._ordered(part, self._read(pair.magnitude, part.rows)).to(weight.device)
                found = torch.linalg.vector_norm(weight[start:stop] + pair.scale * b @ a, dim=1)
                gain[start:stop] = self._ratio(pair.magnitude, wanted, found)
            start = stop
        return gain.to(self._device)

    def _shift(self, product: Product, outputs: int, gain: Tensor | None) -> Tensor | None:
        """Return the adapter's biases, and what the gain took from the base model's."""
        pairs = self._adapter.pairs
        shift = torch.zeros(outputs, dtype=torch.float32, device=self._device)
        has_any = False
        if gain is not None and product.bias is not None:
            shift += (1 - gain) * product.bias.to(self._device).float()
            has_any = True
        start = 0
        for part in product.parts:
            pair = pairs.get(part.name)
            if pair is not None and pair.bias is not None and product.adds_bias:
                bias = self._ordered(part, self._read(pair.bias, part.rows))
                shift[start : start + part.num_kept] += pair.scale * bias.to(self._device)
                has_any = True
            start += part.num_kept
        return shift if has_any else None

    def _embedding_pair(self, pair: Pair, table: Table) -> EmbeddingFactors:
        if pair.copy is not None:
            self._check_copy(pair.copy, table)
        a = self._read(pair.a, [(0, pair.rank)]).t()
        b = self._read(pair.b, [(0, self._rows(pair.b))]) * pair.scale
        new = self._adapter.rows.get(table.module)
        gain = None
        if pair.magnitude is not None:
            squares = torch.zeros(len(b), dtype=torch.float32)
            for chunk in _chunks(table.size):
                rows = table.rows(chunk).float().cpu() + a[slice(*chunk)] @ b.t()
                squares += rows.square().sum(0)
            wanted = self._read(pair.magnitude, [(0, len(b))])
            gain = self._ratio(pair.magnitude, wanted, squares.sqrt()).to(self._device)
        return EmbeddingFactors(
            rows=None if new is None else self._new_rows(new, table),
            a=self._placed(pair.a, a),
            b=self._placed(pair.b, b),
            gain=gain,
        )

    def _new_rows(self, new: NewRows, table: Table) -> TableRows:
        if new.ids is not None:
            ids = torch.tensor(new.ids, dtype=torch.int64)
            order = ids.argsort()
            weight = self._read(new.key, [(0, len(ids))])[order]
            return TableRows(ids[order].to(self._device), self._placed(new.key, weight))
        ids = self._changed(new.key, table)
        if len(ids) > MAX_NEW_ROWS:
            raise self._adapter.error(
                f"tensor {new.key:.200} changes {len(ids)} rows of the base model's; {MAX_NEW_ROWS} are served at "
                "most; merge the adapter into the model",
            )
        weight = self._read(new.key, [(token, token + 1) for token in ids.tolist()])
        return TableRows(ids.to(self._device), self._placed(new.key, weight))

    def _check_copy(self, key: str, table: Table) -> None:
        if not self._is_copy(key, table):
            text = f"tensor {key:.200} replaces the base model's; only a copy of it is served"
            raise self._adapter.error(text)

    def _is_copy(self, key: str, table: Table) -> bool:
        if not table.is_quantized:
            return not len(self._changed(key, table))
        squares, rounding = 0.0, 0.0
        for chunk in _chunks(table.size):
            rows = table.rows(chunk).float().cpu()
            squares += float(rows.square().sum())
            rounding += float((self._read(key, [chunk]) - rows).square().sum())
        return rounding <= _MOST_ROUNDING**2 * squares

    def _changed(self, key: str, table: Table) -> Tensor:
        """Find the rows of a whole matrix that differ from the base model's."""
        found = []
        for chunk in _chunks(table.size):
            own = self._placed(key, self._read(key, [chunk]))
            found.append((own != table.rows(chunk).to(own.device)).any(1).nonzero().flatten().cpu() + chunk[0])
        return torch.cat(found)

    def _a(self, module: str, inputs: Range | None) -> Tensor:
        pair = self._adapter.pairs[module]
        whole = self._read(pair.a, [(0, pair.rank)])
        return self._placed(pair.a, whole if inputs is None else whole[:, slice(*inputs)])

    def _b(self, part: Part) -> Tensor:
        """Read B with the scale, before rounding to the model's type."""
        pair = self._adapter.pairs[part.name]
        return self._placed(pair.b, self._ordered(part, self._read(pair.b, part.rows)) * pair.scale)

    def _of_expert(self, wanted: ExpertRows, columns: Range | None) -> tuple[Tensor, Tensor]:
        """Read A [rank, inputs] and B [outputs, rank]."""
        pair = self._adapter.pairs[wanted.name]
        if wanted.name not in self._experts:
            while len(self._experts) >= _KEPT_PARAMETERS:
                del self._experts[next(iter(self._experts))]
            a, b = (self._read(key, [(0, self._rows(key))]) for key in (pair.a, pair.b))
            self._experts[wanted.name] = a, b
        a, b = pair.of_expert(*self._experts[wanted.name], wanted.expert)
        b = torch.cat([b[slice(*cut)] for cut in wanted.rows]) * pair.scale
        if wanted.order is not None:
            b = b[wanted.order.to(b.device)]
        return self._placed(pair.a, a if columns is None else a[:, slice(*columns)]), self._placed(pair.b, b)

    def _read(self, key: str, rows: Sequence[Range]) -> Tensor:
        """In float32 on the host."""
        return self._adapter.finite_rows(self._opened, key, rows)

    def _rows(self, key: str) -> int:
        return self._opened.shape(key)[0]

    def _ratio(self, key: str, wanted: Tensor, found: Tensor) -> Tensor:
        ratio = wanted / found
        if not ratio.isfinite().all():
            raise self._adapter.error(f"tensor {key:.200} gives a length to rows that are all 0")
        return ratio

    @staticmethod
    def _ordered(part: Part, rows: Tensor) -> Tensor:
        return rows if part.order is None else part.order.apply(rows)

    def _placed(self, key: str, tensor: Tensor) -> Tensor:
        """Put a tensor where the model reads it; infinite numbers, which would reach other rows, are refused."""
        placed = tensor.to(self._device, self._dtype).contiguous()
        if not placed.isfinite().all():
            raise self._adapter.error(
                f"tensor {key:.200}, with its scale, is too large for the model's type, {self._dtype}: it is damaged, "
                "or needs another --dtype"
            )
        return placed


def _chunks(size: int) -> list[Range]:
    return [(first, min(first + _CHUNK, size)) for first in range(0, size, _CHUNK)]
