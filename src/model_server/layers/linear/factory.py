"""Decides, at loading, which kind of product a matrix gets.

On a CPU packed matrices make decode GEMMs 1.3 to 3 times faster: in our panels, or oneDNN's layout (`panel_choice`). On
a GPU decode GEMMs are measured, and our kernels decode quantized matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from model_server.cpp import library as cpp
from model_server.cpp.config import are_measured
from model_server.distributed.group import ProcessGroup
from model_server.kernels.availability import usable
from model_server.layers.linear.code_panels import CodeLinear, can_pack
from model_server.layers.linear.decode_gemm import BUCKETS, DecodeGemm, DecodeGemmLinear, Product, measure
from model_server.layers.linear.dequantizing import DequantizingLinear, OffsetLinear, SplitLinear, offsets_of
from model_server.layers.linear.linear import Linear, TorchLinear
from model_server.layers.linear.onednn import SMALLEST_PACKED, OneDnnLinear, weight_packer
from model_server.layers.linear.packed import PackedLinear
from model_server.layers.linear.panel_choice import PanelChoice
from model_server.quantization.forms import Form, Plain, Stacked
from model_server.quantization.forms.offset_codes import OffsetCodes

# Matrices below this size take no time worth the measurement.
SMALLEST_MEASURED = 1 << 20


class LinearFactory:
    """Makes the products of one type on one device, and keeps the shapes to measure."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, num_ranks: int = 1, batch_invariant: bool = False
    ) -> None:
        """Make a factory.

        Args:
            num_ranks: That divide the matrices.
            batch_invariant: On a GPU, 16-bit matrices use one kernel for any number of rows.
        """
        self.device = device
        self.dtype = dtype
        # Several ranks must multiply alike what all of them multiply, and come to shapes at different times.
        measured = num_ranks == 1 and are_measured()
        self._panels = None
        if cpp.usable(device, dtype):
            self._panels = PanelChoice(weight_packer(device, dtype) if measured else None)
        self._invariant = _invariant_product(device, dtype) if batch_invariant else None
        self._candidates = _kernels(device, dtype)
        self._decoding = _decoding_kernels(device, dtype)
        self._gemms: dict[tuple[int, int], DecodeGemm] = {}
        # What products take less than their forms.
        self.saved_bytes = 0

    def make(self, form: Form, bias: Tensor | None = None) -> Linear:
        """Make the fastest product with `form` [out, in] and `bias` [out]."""
        if isinstance(form, Stacked):
            return self._split(form, bias)
        if not isinstance(form, Plain):
            return self._quantized(form, bias)
        weight = form.dequantize(self.dtype)
        if self._invariant is not None:
            return DecodeGemmLinear(weight.contiguous(), bias, self._invariant)
        if self._panels is not None and weight.shape[1] % 2 == 0 and self._panels.takes(weight):
            return PackedLinear(weight, bias)
        packer = weight_packer(self.device, self.dtype) if weight.numel() >= SMALLEST_PACKED else None
        if packer is not None:
            return OneDnnLinear(weight, bias, packer)
        if self._candidates and weight.numel() >= SMALLEST_MEASURED and weight.is_contiguous():
            return DecodeGemmLinear(weight, bias, self._gemm(weight, self._candidates))
        return TorchLinear(weight, bias)

    def _quantized(self, form: Form, bias: Tensor | None) -> Linear:
        if can_pack(form) and cpp.usable(self.device, self.dtype):
            packed = CodeLinear(form, bias, self.dtype)
            self.saved_bytes += form.nbytes - packed.panels.nbytes
            return packed
        if isinstance(form, OffsetCodes):
            return OffsetLinear(self._quantized(form.codes, bias), TorchLinear(offsets_of(form), None), form)
        linear = None if self._decoding is None else self._decoding(form, bias)
        return DequantizingLinear(form, bias) if linear is None else linear

    def _split(self, form: Stacked, bias: Tensor | None) -> Linear:
        parts: list[Linear] = []
        start = 0
        for part in form.forms:
            stop = start + part.shape[0]
            parts.append(self.make(part, None if bias is None else bias[start:stop]))
            start = stop
        return SplitLinear(parts)

    def measure(self, group: ProcessGroup) -> None:
        """Choose for all shapes so far (`decode_gemm.measure`); all ranks together."""
        if self._panels is not None:
            self._panels.log()
        if self.device.type == "cuda":
            measure(list(self._gemms.values()), self.device, group)

    def _gemm(self, weight: Tensor, candidates: Sequence[Sequence[Product]]) -> DecodeGemm:
        shape = (weight.shape[0], weight.shape[1])
        if shape not in self._gemms:
            self._gemms[shape] = DecodeGemm(shape, self.dtype, candidates)
        return self._gemms[shape]


def _kernels(device: torch.device, dtype: torch.dtype) -> Sequence[Sequence[Product]]:
    """Return our products for each bucket of rows; none in float32, where rows must not depend on others."""
    if not _runs_kernels(device, dtype):
        return ()
    from model_server.kernels.matmul import TileConfig, multiply, tile_configs

    processors = torch.cuda.get_device_properties(device).multi_processor_count

    def product(tiles: TileConfig) -> Product:
        def multiplied(
            x: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            dtype: torch.dtype | None = None,
            out: Tensor | None = None,
        ) -> Tensor:
            return multiply(x, weight, bias, tiles, processors, dtype, out)

        return multiplied

    return [[product(tiles) for tiles in tile_configs(most)] for most in BUCKETS]


def _invariant_product(device: torch.device, dtype: torch.dtype) -> Product | None:
    """Return a product for any number of rows; None: the usual ones do."""
    if not _runs_kernels(device, dtype):
        return None
    from model_server.kernels.matmul import multiply_invariant

    return multiply_invariant


def _decoding_kernels(
    device: torch.device, dtype: torch.dtype
) -> Callable[[Form, Tensor | None], Linear | None] | None:
    """Return what makes our kernels' products of quantized matrices, if they can run."""
    if not _runs_kernels(device, dtype):
        return None
    from model_server.layers.linear.triton import decoding_linear

    return partial(decoding_linear, dtype=dtype)


def _runs_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and usable(device)
