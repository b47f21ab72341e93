"""One layer at a time, as a stage of a pipeline: what enters its matrices, and what it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model_server.attention.choice import AttentionChoice
from model_server.attention.metadata import AttentionMetadata
from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Axis, Layout, Ranks
from model_server.distributed.placement import Placement
from model_server.layers.linear.factory import LinearFactory
from model_server.layers.linear.linear import Linear
from model_server.memory.kv_cache import KvCache
from model_server.models.decoder.attention.layers import attention_layers
from model_server.models.decoder.build import build
from model_server.models.decoder.decoder import Decoder
from model_server.models.decoder.spec import Spec
from model_server.quantization.forms import Form
from model_server.quantization.scheme import Scheme
from model_server.quantize.solver import Hessian
from model_server.runner.runner import ModelInputs, RequestState
from model_server.weights.gguf.delta_heads import ColumnOrder
from model_server.weights.matrix import MatrixSlice
from model_server.weights.reader import Place, Range, SafetensorsReader, WeightReader

# As for several ranks, no product is chosen by a measurement: the same run gives the same bytes.
_UNMEASURED = 2


@dataclass
class Watch:
    """Hessians of a layer's matrices by module, shared between those of the same input."""

    device: torch.device
    # Inputs are added.
    is_on: bool = False
    hessians: dict[str, Hessian] = field(default_factory=dict)
    transposed: set[str] = field(default_factory=set)
    # Tensors of all experts' matrices.
    stacked: set[str] = field(default_factory=set)
    _slices: dict[int, tuple[Form, MatrixSlice]] = field(default_factory=dict)

    def read(self, form: Form, wanted: MatrixSlice) -> None:
        """Note what `form` was read from, and hold it, so that its id is unique."""
        self._slices[id(form)] = (form, wanted)

    def of(self, form: Form) -> Hessian | None:
        """Return the Hessian for products with `form`, if it is quantized."""
        found = self._slices.pop(id(form), None)
        if found is None:
            return None
        wanted = found[1]
        names = [part.name for part in wanted.parts]
        if wanted.expert is not None:
            self.stacked.update(names)
            return None
        hessian = Hessian(wanted.columns[1], self.device)
        self.hessians.update(dict.fromkeys(names, hessian))
        if wanted.transposed:
            self.transposed.update(names)
        return hessian

    def shared(self) -> list[tuple[Hessian, list[str]]]:
        """List the Hessians, each with the modules whose inputs it is of."""
        found: dict[int, tuple[Hessian, list[str]]] = {}
        for name, hessian in self.hessians.items():
            found.setdefault(id(hessian), (hessian, []))[1].append(name)
        return list(found.values())


class WatchedScheme(Scheme):
    """Plain weights, with their matrices noted."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def read(self, reader: WeightReader, wanted: MatrixSlice, *, as_stored: bool = False) -> Form:
        form = super().read(reader, wanted, as_stored=as_stored)
        if not as_stored:
            self._watch.read(form, wanted)
        return form


class WatchedLinears(LinearFactory):
    """Products that add inputs to their Hessian."""

    def __init__(self, device: torch.device, dtype: torch.dtype, watch: Watch) -> None:
        super().__init__(device, dtype, num_ranks=_UNMEASURED)
        self._watch = watch

    def make(self, form: Form, bias: Tensor | None = None) -> Linear:
        linear, hessian = super().make(form, bias), self._watch.of(form)
        return linear if hessian is None else WatchedLinear(linear, hessian, self._watch)


class WatchedLinear:
    """A `Linear` whose inputs are looked at."""

    def __init__(self, base: Linear, hessian: Hessian, watch: Watch) -> None:
        self._base, self._hessian, self._watch = base, hessian, watch

    def __call__(self, x: Tensor) -> Tensor:
        self._look(x)
        return self._base(x)

    def wide(self, x: Tensor) -> Tensor:
        self._look(x)
        return self._base.wide(x)

    def _look(self, x: Tensor) -> None:
        if self._watch.is_on:
            self._hessian.add(x)


class ReplacedMatrices:
    """A `WeightReader` with other matrices for some names, stored as in the file."""

    def __init__(self, base: SafetensorsReader, replaced: Mapping[str, Tensor]) -> None:
        self._base, self._replaced = base, replaced

    @property
    def dtype(self) -> torch.dtype:
        return self._base.dtype

    @property
    def device(self) -> torch.device:
        return self._base.device

    def has(self, name: str) -> bool:
        return self._base.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    def stored(self, name: str) -> str:
        return self._base.stored(name)

    def rows(self, name: str, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> Tensor:
        return self._base.rows(name, ranges, dtype)

    def raw(self, name: str, rows: Range | None = None, columns: Range | None = None) -> Tensor:
        return self._base.raw(name, rows, columns)

    def columns(self, name: str) -> ColumnOrder | None:
        return self._base.columns(name)

    def skip(self, *names: str) -> None:
        self._base.skip(*names)

    def fill(
        self, out: Tensor, name: str, rows: Sequence[Range], columns: Range | None = None, *,
        index: int | None = None, place: Place = Tensor.copy_, unit: int = 1,
    ) -> None:  # fmt: skip
        matrix = self._replaced.get(name)
        if matrix is None:
            self._base.fill(out, name, rows, columns, index=index, place=place, unit=unit)
            return
        position = 0
        for start, stop in rows:
            part = matrix[start:stop] if columns is None else matrix[start:stop, slice(*columns)]
            place(out[position : position + stop - start], part.to(out.device, out.dtype))
            position += stop - start


class LayerByLayer:
    """Builds one layer at a time."""

    def __init__(self, spec: Spec, reader: SafetensorsReader) -> None:
        self.spec = spec
        self.device, self.dtype = reader.device, reader.dtype
        self._reader = reader
        self._attention = AttentionChoice(None, self.device, self.dtype).for_layers(attention_layers(spec))

    def stored(self, name: str) -> Tensor:
        """Read a whole matrix [rows, columns] float32."""
        return self._reader.rows(name, [(0, self._reader.shape(name)[0])], torch.float32)

    def build(
        self, index: int, *, watch: Watch | None = None, replaced: Mapping[str, Tensor] | None = None,
        with_head: bool = False,
    ) -> Layer:  # fmt: skip
        """Build a layer.

        Args:
            replaced: Matrices by tensor names.
            with_head: The last layer gives logits.
        """
        count = self.spec.num_layers
        stages = Axis(index, count if with_head else count + 1)
        layout = Layout(stage=stages, layer_counts=(*(1,) * count, 0))
        return Layer(self._decoder(layout, watch, replaced or {}), self.device, self.dtype)

    def whole(self) -> Writer:
        """Load all layers at once."""
        return Writer(self._decoder(Layout(), None, {}), self.device, self.dtype)

    def _decoder(self, layout: Layout, watch: Watch | None, replaced: Mapping[str, Tensor]) -> Decoder:
        alone = ProcessGroup()
        return build(
            self.spec,
            ReplacedMatrices(self._reader, replaced),
            Placement(self.device, self.dtype, Ranks(layout, alone, alone)),
            self._attention,
            scheme=None if watch is None else WatchedScheme(watch),
            linears=LinearFactory(self.device, self.dtype, num_ranks=_UNMEASURED)
            if watch is None
            else WatchedLinears(self.device, self.dtype, watch),
        )


class Writer:
    """A whole model that writes."""

    def __init__(self, decoder: Decoder, device: torch.device, dtype: torch.dtype) -> None:
        self._decoder, self._device, self._dtype = decoder, device, dtype

    def rows_within(self, num_bytes: int, length: int) -> int:
        """Count the rows of `length` tokens whose keys and values take `num_bytes`."""
        size = self._decoder.traits.block_size
        row = -(-length // size) * sum(shape.block_bytes(size, self._dtype) for shape in self._decoder.kv_shapes)
        return num_bytes // max(row, 1)

    def write(self, starts: Tensor, length: int, *, never: Sequence[int], generator: torch.Generator) -> Tensor:
        """Continue each start [n] int64 by draws from the model's distribution, to [n, length].

        Args:
            never: Tokens that are not drawn, such as those that end a text.
        """
        count, size = len(starts), self._decoder.traits.block_size
        tables = torch.arange(1, 1 + count * -(-length // size), dtype=torch.int32, device=self._device).view(count, -1)
        cache = KvCache(self._decoder.kv_shapes, 1 + tables.numel(), size, self._dtype, self._device)
        starts_of_rows = torch.arange(count + 1, dtype=torch.int32, device=self._device)
        states = tuple(RequestState(1, slot) for slot in range(count))
        ids = torch.empty(count, length, dtype=torch.int64)
        ids[:, 0] = starts
        for position in range(length - 1):
            metadata = AttentionMetadata(
                slots=tables[:, position // size].long() * size + position % size,
                block_tables=tables,
                cu_seqlens_q=starts_of_rows,
                kv_lengths=torch.full((count,), position + 1, dtype=torch.int32, device=self._device),
                query_lengths_host=(1,) * count,
                kv_lengths_host=(position + 1,) * count,
            )
            given = ids[:, position].to(self._device)
            inputs = ModelInputs(
                input_ids=given, positions=torch.full_like(given, position), attention=metadata, logit_rows=None,
                states=states,
            )  # fmt: skip
            logits = self._decoder.forward(inputs, cache).float()
            logits[:, list(never)] = -torch.inf
            bounds = logits.softmax(dim=1).cumsum(dim=1)
            # Within (0, 1], so that no token of probability 0 is drawn.
            draws = (1 - torch.rand(count, 1, generator=generator)).to(self._device)
            ids[:, position + 1] = torch.searchsorted(bounds, draws * bounds[:, -1:])[:, 0]
        return ids


class Layer:
    """A layer, the first with the embedding, the last perhaps with the head."""

    def __init__(self, decoder: Decoder, device: torch.device, dtype: torch.dtype) -> None:
        self._decoder, self._device, self._dtype = decoder, device, dtype
        self._cache: KvCache | None = None

    def __call__(self, given: Tensor) -> Tensor:
        """Run one sequence: ids [tokens] or hidden [tokens, hidden], to hidden states or logits."""
        length = len(given)
        block_size = self._decoder.traits.block_size
        num_blocks = -(-length // block_size) + 1
        if self._cache is None or self._cache.num_blocks != num_blocks:
            self._cache = KvCache(self._decoder.kv_shapes, num_blocks, block_size, self._dtype, self._device)
        given = given.to(self._device)
        is_ids = given.dtype == torch.int64
        positions = torch.arange(length, device=self._device)
        inputs = ModelInputs(
            input_ids=given if is_ids else torch.zeros_like(positions),
            positions=positions,
            attention=self._metadata(length, num_blocks, block_size),
            logit_rows=None,
            hidden=None if is_ids else given.clone(),
        )
        return self._decoder.forward(inputs, self._cache)

    def _metadata(self, length: int, num_blocks: int, block_size: int) -> AttentionMetadata:
        def numbers(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._device)

        return AttentionMetadata(
            slots=torch.arange(block_size, block_size + length, device=self._device),
            block_tables=numbers(*range(1, num_blocks)).unsqueeze(0),
            cu_seqlens_q=numbers(0, length),
            kv_lengths=numbers(length),
            query_lengths_host=(length,),
            kv_lengths_host=(length,),
        )
