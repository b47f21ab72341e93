"""An adapter merged into its base model when weights are read: in float32, in memory, by each rank for its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from model_server.adapters.folder import Adapter, NewRows, Pair
from model_server.errors import StartupError
from model_server.weights.gguf.delta_heads import ColumnOrder
from model_server.weights.products import ExpertPlace
from model_server.weights.reader import Place, Range, SafetensorsReader, WeightReader, copy_into

_WEIGHT, _BIAS = ".weight", ".bias"


class Merging:
    """What one adapter makes of matrices and biases of the base model, in float32."""

    def __init__(self, adapter: Adapter, opened: SafetensorsReader, embedding: str, dtype: torch.dtype) -> None:
        """Take the adapter, its opened tensors, and the model's embedding and type."""
        self._adapter = adapter
        self._opened = opened
        self._embedding = embedding
        self._dtype = dtype
        self._gains: dict[str, Tensor] = {}
        self._experts: dict[str, tuple[Tensor, Tensor]] = {}  # of the parameters of one layer

    def changes(self, module: str) -> bool:
        """Whether its matrix is another one."""
        return module in self._adapter.pairs or module in self._adapter.rows

    def changes_bias(self, module: str) -> bool:
        """Whether its bias is another one."""
        return module in self._adapter.pairs and self._adapter.pairs[module].bias is not None

    def matrix(
        self, module: str, weight: Tensor, rows: Sequence[Range], columns: Range, whole: Callable[[], Tensor]
    ) -> Tensor:
        """Merge into a part of the base model's matrix [out, in], in place.

        Raises:
            StartupError: Numbers are not finite, or a saved copy is not the base model's.
        """
        new, pair = self._adapter.rows.get(module), self._adapter.pairs.get(module)
        if new is not None:
            self._put_rows(new, weight, rows, columns)
        if pair is None:
            return weight
        if pair.copy is not None:
            self._check_copy(pair.copy, weight, rows, columns)
        weight += self._product(module, pair, rows, columns).to(weight.device)
        if pair.magnitude is not None:
            gain = self._gain(module, pair, pair.magnitude, whole).to(weight.device)
            weight *= gain[slice(*columns)] if module == self._embedding else _picked(gain, rows)[:, None]
        return weight

    def expert(self, place: ExpertPlace, expert: int, weight: Tensor, rows: Sequence[Range], columns: Range) -> Tensor:
        """Merge into a part of the matrix of one expert of a tensor at `place`, in place."""
        pair = self._adapter.pairs[place.parameter]
        if place.parameter not in self._experts:
            module = place.parameter.rpartition(".")[0]
            self._experts = {name: kept for name, kept in self._experts.items() if name.startswith(module + ".")}
            a, b = (self._read(key, [(0, self._opened.shape(key)[0])]) for key in (pair.a, pair.b))
            self._experts[place.parameter] = a, b
        a, b = pair.of_expert(*self._experts[place.parameter], expert)
        outputs, inputs = ([columns], rows) if place.transposed else (rows, [columns])
        b = _picked(b, [(place.first + start, place.first + stop) for start, stop in outputs])
        change = (pair.scale * b @ _picked(a.t(), inputs).t()).to(weight.device)
        weight += change.t() if place.transposed else change
        return weight

    def bias(self, module: str, bias: Tensor, rows: Sequence[Range]) -> Tensor:
        """bias: these rows of the base model's."""
        pair = self._adapter.pairs[module]
        assert pair.bias is not None
        return bias + pair.scale * self._read(pair.bias, rows).to(bias.device)

    def _product(self, module: str, pair: Pair, rows: Sequence[Range], columns: Range) -> Tensor:
        a = self._read(pair.a, [(0, pair.rank)])
        if module == self._embedding:
            return pair.scale * _picked(a.t(), rows) @ self._read(pair.b, [columns]).t()
        return pair.scale * self._read(pair.b, rows) @ a[:, slice(*columns)]

    def _put_rows(self, new: NewRows, weight: Tensor, rows: Sequence[Range], columns: Range) -> None:
        if new.ids is None:
            weight.copy_(self._read(new.key, rows)[:, slice(*columns)])
            return
        places = {token: place for place, token in enumerate(token for cut in rows for token in range(*cut))}
        values = self._read(new.key, [(0, len(new.ids))])[:, slice(*columns)].to(weight.device)
        for value, token in zip(values, new.ids, strict=True):
            if token in places:
                weight[places[token]] = value

    def _gain(self, module: str, pair: Pair, magnitude: str, whole: Callable[[], Tensor]) -> Tensor:
        """Return the wanted lengths of rows (of an embedding: columns) over the present ones."""
        if module not in self._gains:
            weight = whole()
            size, width = weight.shape
            weight += self._product(module, pair, [(0, size)], (0, width)).to(weight.device)
            found = torch.linalg.vector_norm(weight, dim=0 if module == self._embedding else 1)
            gain = self._read(magnitude, [(0, len(found))]).to(found.device) / found
            if not gain.isfinite().all():
                raise self._adapter.error(f"tensor {magnitude:.200} gives a length to rows that are all 0")
            self._gains[module] = gain
        return self._gains[module]

    def _check_copy(self, key: str, weight: Tensor, rows: Sequence[Range], columns: Range) -> None:
        copy = self._read(key, rows)[:, slice(*columns)].to(weight.device, self._dtype)
        if not torch.equal(copy, weight.to(self._dtype)):
            raise self._adapter.error(f"tensor {key:.200} replaces the base model's; only a copy of it is served")

    def _read(self, key: str, rows: Sequence[Range]) -> Tensor:
        return self._adapter.finite_rows(self._opened, key, rows)


class MergedReader:
    """A `WeightReader` with the adapter merged in.

    Of the `tied` modules, one that the base model lacks is read as the other: a changed head is no longer tied.
    """

    def __init__(
        self,
        base: WeightReader,
        adapter: Adapter,
        opened: SafetensorsReader,
        *,
        tied: tuple[str, str],
        transposed: bool,
        experts: Mapping[str, ExpertPlace],
    ) -> None:
        """Take the base's reader and the adapter.

        Args:
            transposed: Matrices other than `tied` are stored as [in, out].
            experts: By the names of their tensors.

        Raises:
            StartupError: The base has a changed matrix as other tensors, as GGUF files have `kv_b_proj`.
        """
        own = {*tied, *(place.parameter for place in experts.values())}
        for module in adapter.pairs:
            if module not in own and not base.has(module + _WEIGHT):
                raise adapter.error(
                    f"the base model's files have {module:.200} in other tensors, into which it cannot be merged: give "
                    "the base model as --model-id, and name the adapter in --lora-adapters"
                )
        self._base = base
        self._merging = Merging(adapter, opened, tied[0], base.dtype)
        self._tied = tied
        self._transposed = transposed
        self._experts = {name: place for name, place in experts.items() if self._merging.changes(place.parameter)}
        embedding, head = (module + _WEIGHT for module in tied)
        is_changed = any(self._merging.changes(module) for module in tied)
        self._others = {embedding: head, head: embedding} if is_changed else {}

    @property
    def dtype(self) -> torch.dtype:
        return self._base.dtype

    @property
    def device(self) -> torch.device:
        return self._base.device

    def has(self, name: str) -> bool:
        has = self._base.has(self._stored_name(name))
        if not has and name.endswith(_BIAS) and self._merging.changes_bias(name.removesuffix(_BIAS)):
            raise StartupError(
                f"the adapter adds {name} to a layer without a bias, which cannot be merged: give the base model as "
                "--model-id, and name the adapter in --lora-adapters"
            )
        return has

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(self._stored_name(name))

    def stored(self, name: str) -> str:
        return self._base.stored(self._stored_name(name))

    def raw(self, name: str, rows: Range | None = None, columns: Range | None = None) -> Tensor:
        return self._base.raw(name, rows, columns)

    def columns(self, name: str) -> ColumnOrder | None:
        return self._base.columns(name)

    def skip(self, *names: str) -> None:
        self._base.skip(*names)

    def rows(self, name: str, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> Tensor:
        module = name.removesuffix(_BIAS)
        if name.endswith(_BIAS) and self._merging.changes_bias(module):
            bias = self._base.rows(name, ranges, torch.float32)
            return self._merging.bias(module, bias, ranges).to(dtype or self.dtype)
        if not self._is_merged(name):
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
        stored = self._stored_name(name)
        if not self._is_merged(name):
            self._base.fill(out, stored, rows, columns, index=index, place=place, unit=unit)
            return
        merged = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self._base.fill(merged, stored, rows, columns, index=index)
        wanted = (0, self.shape(name)[-1]) if columns is None else columns
        module = name.removesuffix(_WEIGHT)
        if name.endswith(_WEIGHT) and self._merging.changes(module):
            merged = self._matrix(name, module, merged, rows, wanted)
        if name in self._experts:
            of_experts = self._experts[name]
            expert = index if of_experts.expert is None else of_experts.expert
            assert expert is not None, "a tensor of all experts is read by index"
            merged = self._merging.expert(of_experts, expert, merged, rows, wanted)
        first = 0
        for start, stop in rows:
            last = first + stop - start
            place(out[first:last], merged[first:last])
            first = last

    def _matrix(self, name: str, module: str, weight: Tensor, rows: Sequence[Range], wanted: Range) -> Tensor:
        """Read and merge a part of a matrix that is not an expert's."""
        is_transposed = self._transposed and module not in self._tied

        def whole() -> Tensor:
            found = self._base.rows(self._stored_name(name), [(0, self.shape(name)[0])], torch.float32)
            return found.t() if is_transposed else found

        if not is_transposed:
            return self._merging.matrix(module, weight, rows, wanted, whole)
        inputs, width = rows[0], rows[0][1] - rows[0][0]
        assert len(rows) == 1 and width == len(weight), "the columns of a rank are one range"
        return self._merging.matrix(module, weight.t(), [wanted], inputs, whole).t()

    def _is_merged(self, name: str) -> bool:
        return name in self._experts or (name.endswith(_WEIGHT) and self._merging.changes(name.removesuffix(_WEIGHT)))

    def _stored_name(self, name: str) -> str:
        return self._others[name] if name in self._others and not self._base.has(name) else name


def with_tied_rows(adapter: Adapter, embedding: str, head: str) -> Adapter:
    """Make new rows of tokens the head's too, for a tied head."""
    shared = adapter.rows.get(embedding)
    if shared is None or shared.ids is None or head in adapter.rows:
        return adapter
    return Adapter(
        name=adapter.name,
        base=adapter.base,
        rank=adapter.rank,
        pairs=adapter.pairs,
        rows={**adapter.rows, head: shared},
        headers=adapter.headers,
        originals=adapter.originals,
    )


def _picked(tensor: Tensor, rows: Sequence[Range]) -> Tensor:
    return torch.cat([tensor[slice(*cut)] for cut in rows])
