"""This rank's share of a checkpoint, as layers: decides what sharding and storage orders mean."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from model_server.attention.backend import Alibi
from model_server.distributed.group import ProcessGroup
from model_server.errors import StartupError
from model_server.layers.changes import ProductChanges
from model_server.layers.fused.fused import Fused
from model_server.layers.fused.torch import TorchFused
from model_server.layers.linear.factory import LinearFactory
from model_server.layers.linear.linear import Linear
from model_server.layers.norm import AddNorm, OfWideStream
from model_server.layers.rotary import Rope
from model_server.quantization.forms import Form
from model_server.quantization.kv_cache import CacheScales
from model_server.quantization.scheme import Scheme
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.products import Product
from model_server.weights.reader import Range, WeightReader

NormKind = Literal["rms", "layer"]


@dataclass(slots=True)
class Loader:
    """Reads, and counts the bytes of forms; `ropes` collects the layers' distinct rotations."""

    reader: WeightReader
    device: torch.device
    tensor_group: ProcessGroup
    norm_kind: NormKind = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norm_affine: bool = True  # False: layer norms without tensors
    fused: Fused = field(default_factory=TorchFused)
    first_layer: int = 0  # of this rank: its cache holds the layers from there on
    cache_scales: CacheScales | None = None  # None: the cache has none
    scheme: Scheme = field(default_factory=Scheme)
    batch_invariant: bool = False
    changes: ProductChanges = field(default_factory=ProductChanges)
    num_drafted: int = 0  # the longest draft, behind which the cache must be able to go back
    weight_bytes: int = 0
    ropes: list[Rope] = field(default_factory=list)
    chosen_linears: LinearFactory | None = None  # None: the fastest
    linears: LinearFactory = field(init=False)
    _alibis: dict[tuple[tuple[float, ...], float | None], Alibi] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.linears = self.chosen_linears or LinearFactory(
            self.device, self.reader.dtype, num_ranks=self.tensor_group.size, batch_invariant=self.batch_invariant
        )

    @property
    def held_bytes(self) -> int:
        """Return bytes of weights in memory, as packed."""
        return self.weight_bytes - self.linears.saved_bytes

    def share(self, size: int) -> Range:
        """Return this rank's part of an evenly divided dimension."""
        count = self.tensor_group.size
        if size % count != 0:
            # TGI's words, spelling included.
            raise StartupError(f"The choosen size {size} is not compatible with sharding on {count} shards")
        share = size // count
        return self.tensor_group.rank * share, (self.tensor_group.rank + 1) * share

    def rope_index(self, rope: Rope | None) -> int | None:
        """Return where `Step.rotations` has `rope`."""
        if rope is None:
            return None
        if rope not in self.ropes:
            self.ropes.append(rope)
        return self.ropes.index(rope)

    def alibi(self, slopes: tuple[float, ...], bfloat16_scale: float | None) -> Alibi:
        """Return one object for equal arguments, whose biases attention computes once a step."""
        key = (slopes, bfloat16_scale)
        if key not in self._alibis:
            tensor = torch.tensor(slopes, dtype=torch.float32, device=self.device)
            self._alibis[key] = Alibi(tensor, bfloat16_scale)
        return self._alibis[key]

    def has(self, name: str) -> bool:
        return self.reader.has(name)

    def rows(
        self, name: str, ranges: Sequence[Range], num_columns: int | None = None, num_rows: int | None = None
    ) -> Tensor:
        """Read rows of the tensor `name`; sizes None: any."""
        for dimension, size in enumerate((num_rows, num_columns)):
            if size is not None:
                self._expect(name, dimension, size)
        return self._count(self.reader.rows(name, ranges))

    def vector(self, name: str, ranges: Sequence[Range], size: int | None, dtype: torch.dtype | None = None) -> Tensor:
        """Read numbers of a vector of `size`, in `dtype` or the model's."""
        shape = self.reader.shape(name)
        if len(shape) != 1 or size not in (None, *shape):
            raise StartupError(f"weight {name} has shape {list(shape)}; the config asks for {[size]}")
        return self._count(self.reader.rows(name, ranges, dtype))

    def numbers(self, name: str, part: Range, size: int) -> Tensor:
        """Read a part of `size` numbers in float32, whatever the dimensions of 1 around them."""
        if math.prod(self.reader.shape(name)) != size:
            shape = list(self.reader.shape(name))
            raise StartupError(f"weight {name} has shape {shape}; the config asks for {[size]}")
        found = self.reader.raw(name).flatten()[slice(*part)]
        return self._count(found.to(self.device, torch.float32))

    def depthwise(self, names: Sequence[str], channels: Sequence[Range], num_channels: int, width: int) -> Tensor:
        """Read a convolution [num_channels, 1, width] as [width, channels] float32.

        Args:
            names: Tensors that hold it one after another, cut wherever their writer did.
            channels: Ascending.
        """
        shapes = [tuple(self.reader.shape(name)) for name in names]
        if sum(shape[0] for shape in shapes) != num_channels or any(shape[1:] != (1, width) for shape in shapes):
            found = " and ".join(f"{name} has shape {list(shape)}" for name, shape in zip(names, shapes, strict=True))
            raise StartupError(f"weight {found}; the config asks for {[num_channels, 1, width]} in all")
        parts = []
        before = 0
        for name, shape in zip(names, shapes, strict=True):
            cuts = [(max(a - before, 0), min(b - before, shape[0])) for a, b in channels]
            own = [(a, b) for a, b in cuts if a < b]
            if own:
                parts.append(self.reader.rows(name, own, torch.float32))
            else:
                self.reader.skip(name)  # other ranks' alone
            before += shape[0]
        return self._count(torch.cat(parts)).squeeze(1).t().contiguous()

    def whole(self, name: str) -> Tensor:
        """All of a tensor."""
        return self.rows(name, [(0, self.reader.shape(name)[0])])

    def holds(self, module: str) -> bool:
        """Whether the checkpoint has a matrix for `module`, in any format."""
        return self.scheme.holds(self.reader, module)

    def matrix(self, wanted: MatrixSlice, *, as_stored: bool = False) -> Form:
        """Read this rank's part of matrices, in their format's form.

        Args:
            as_stored: Not quantized on load (embeddings, heads, routers).
        """
        form = self.scheme.read(self.reader, wanted, as_stored=as_stored)
        self.weight_bytes += form.nbytes
        return form

    def dense(self, name: str, num_rows: int, num_columns: int) -> Tensor:
        """Read a whole matrix in the model's type."""
        part = Part(name, ((0, num_rows),), num_rows)
        wanted = MatrixSlice(parts=(part,), columns=(0, num_columns), num_columns=num_columns)
        return self.decoded(wanted)

    def read_again(self, wanted: MatrixSlice, dtype: torch.dtype, *, as_stored: bool = False) -> Tensor:
        """Read matrices as the model has them, quantized on load or not, uncounted."""
        uncounted = replace(self.scheme, _kinds=Counter(), _plain=set())
        return uncounted.read(self.reader, wanted, as_stored=as_stored).dequantize(dtype)

    def decoded(self, wanted: MatrixSlice) -> Tensor:
        """Read this rank's part in the model's type."""
        return self._count(self.scheme.read(self.reader, wanted, as_stored=True).dequantize(self.reader.dtype))

    def column_linear(
        self,
        parts: Sequence[Part],
        num_columns: int,
        *,
        transposed: bool = False,
        as_stored: bool = False,
        biased: bool = True,
    ) -> Linear:
        """Make layers of the same input one product with this rank's rows; biases of all, or none.

        Args:
            transposed: The file holds [in, out].
            as_stored: See `matrix`.
            biased: False: the caller adds the biases.
        """
        wanted = MatrixSlice(
            parts=tuple(parts), columns=(0, num_columns), num_columns=num_columns, transposed=transposed
        )
        form = self.matrix(wanted, as_stored=as_stored)
        biases: list[Tensor] = []
        for part in parts:
            if biased and self.has(part.name + ".bias"):
                bias = self.vector(part.name + ".bias", part.rows, part.num_rows)
                biases.append(bias if part.order is None else part.order.apply(bias))
        if biases and len(biases) < len(parts):
            raise StartupError(f"weight {parts[0].name}.bias: either all biases of this layer must exist or none")
        added = torch.cat(biases) if biases else None
        product = Product(
            parts=tuple(parts),
            columns=None,
            weight=lambda: self.read_again(wanted, torch.float32, as_stored=as_stored),
            bias=added,
        )
        return self.changes.linear(self.linears.make(form, added), product)

    def row_linear(self, name: str, columns: Range, num_rows: int, *, transposed: bool = False) -> Linear:
        """Make a product with this rank's columns; rank 0 adds the bias."""
        part = Part(name, ((0, num_rows),), num_rows)
        # Every rank has as many columns.
        width = (columns[1] - columns[0]) * self.tensor_group.size
        form = self.matrix(MatrixSlice(parts=(part,), columns=columns, num_columns=width, transposed=transposed))
        is_first = self.tensor_group.rank == 0
        bias = None
        if is_first and self.has(name + ".bias"):
            bias = self.vector(name + ".bias", [(0, num_rows)], num_rows)
        self.reader.skip(name + ".bias")
        whole = MatrixSlice(parts=(part,), columns=(0, width), num_columns=width, transposed=transposed)
        product = Product(
            parts=(part,),
            columns=columns,
            weight=lambda: self.read_again(whole, torch.float32),
            bias=bias,
            adds_bias=is_first,
        )
        return self.changes.linear(self.linears.make(form, bias), product)

    def norm(self, name: str, size: int) -> AddNorm:
        """Load a norm over `size` numbers, equal on all ranks."""
        if not self.norm_affine:
            return self.fused.layer_norm(None, None, self.norm_eps)
        bias = self.vector(name + ".bias", [(0, size)], size) if self.has_norm_bias(name) else None
        return self.norm_of(self.vector(name + ".weight", [(0, size)], size), bias)

    def stream_norm(self, name: str, size: int, *, is_wide: bool, is_last: bool = False) -> AddNorm:
        """Load a norm of the residual stream."""
        norm, dtype = self.norm(name, size), self.reader.dtype
        is_wider = is_wide and dtype is not torch.float32
        return OfWideStream(norm, dtype, rounds_first=not is_last) if is_wider else norm

    def has_norm_bias(self, name: str) -> bool:
        """Whether a norm has a bias; RMS norms never do."""
        return self.norm_kind == "layer" and self.has(name + ".bias")

    def norm_of(self, weight: Tensor, bias: Tensor | None) -> AddNorm:
        """Make the model's norm of a weight [n] or [heads, n]."""
        if self.norm_offset:
            weight = weight.float() + self.norm_offset
        if self.norm_kind == "layer":
            return self.fused.layer_norm(weight, bias, self.norm_eps)
        return self.fused.rms_norm(weight, self.norm_eps)

    def _expect(self, name: str, dimension: int, size: int) -> None:
        shape = self.reader.shape(name)
        if len(shape) != 2 or shape[dimension] != size:
            raise StartupError(
                f"weight {name} has shape {list(shape)}; the config asks for {size} at dimension {dimension}"
            )

    def _count(self, tensor: Tensor) -> Tensor:
        self.weight_bytes += tensor.nbytes
        return tensor
