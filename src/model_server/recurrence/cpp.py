"""Recurrent layers by the C++ operators: one call between a layer's products.

A token's sums are taken in one order, so that no bit depends on how prompts are cut or on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure

import torch
from torch import Tensor

from model_server.cpp.library import TYPES, prepared
from model_server.cpp.structs import (
    GatedDeltaStruct,
    KeptConvolutionStruct,
    Mamba1Struct,
    Mamba2Struct,
    ShortConvolutionStruct,
)
from model_server.recurrence.delta_net import DeltaWeights
from model_server.recurrence.mamba1 import KeptWeights, Mamba1Weights
from model_server.recurrence.mamba2 import Gating, Mamba2Weights
from model_server.recurrence.segments import ConvolutionPlan, Segments
from model_server.recurrence.states import LayerStates

# MOST_KEY_DIM of recurrent.hpp.
MOST_KEY_DIM = 512


class CppDeltaNet:
    """A `DeltaNet`, for keys of up to `MOST_KEY_DIM` numbers."""

    def __init__(self, weights: DeltaWeights) -> None:
        self._weights = weights  # keeps what the addresses below point to
        tensors = weights.convolution, weights.rate, weights.bias, weights.norm
        assert all(t.is_contiguous() and t.dtype == torch.float32 for t in tensors)
        self.struct = GatedDeltaStruct(
            key_heads=weights.key_heads,
            repeats=weights.repeats,
            key_dim=weights.key_dim,
            value_dim=weights.value_dim,
            width=len(weights.convolution),
            convolution=weights.convolution.data_ptr(),
            rate=weights.rate.data_ptr(),
            bias=weights.bias.data_ptr(),
            norm=weights.norm.data_ptr(),
            eps=weights.eps,
            most_strength=weights.most_strength,
            by_key=weights.by_key,
            sigmoid=weights.gating == "sigmoid",
        )
        self._function = prepared().cpp_gated_delta

    def __call__(self, projected: Tensor, segments: Segments, states: LayerStates) -> Tensor:
        out = projected.new_empty(len(projected), self._weights.values)
        return _advanced(self._function, self.struct, projected, segments, states, out)


class CppMamba2:
    """A `Mamba2Net`, for states of up to `MOST_KEY_DIM` rows."""

    def __init__(self, weights: Mamba2Weights) -> None:
        self._weights = weights  # keeps what the addresses below point to
        gating = weights.gating
        norm = None if gating is None else gating.norm
        optional = weights.convolution_bias, norm
        tensors = weights.convolution, weights.rate, weights.bias, weights.skip, *optional
        assert all(t is None or (t.is_contiguous() and t.dtype == torch.float32) for t in tensors)
        self.is_apart = gating is None
        self.struct = Mamba2Struct(
            heads=weights.heads,
            head_dim=weights.head_dim,
            groups=weights.groups,
            state_size=weights.state_size,
            width=len(weights.convolution),
            first=weights.first,
            heads_per_group=weights.heads_per_group,
            convolution=weights.convolution.data_ptr(),
            convolution_bias=None if weights.convolution_bias is None else weights.convolution_bias.data_ptr(),
            rate=weights.rate.data_ptr(),
            bias=weights.bias.data_ptr(),
            skip=weights.skip.data_ptr(),
            least=weights.limits[0],
            most=weights.limits[1],
            gating=_gating(gating),
            norm=None if norm is None else norm.data_ptr(),
            norm_groups=1 if gating is None else gating.groups,
            eps=0.0 if gating is None else gating.eps,
        )
        self._function = prepared().cpp_mamba2

    def __call__(self, projected: Tensor, segments: Segments, states: LayerStates) -> Tensor:
        dtype = torch.float32 if self.is_apart else projected.dtype
        out = projected.new_empty(len(projected), self._weights.values, dtype=dtype)
        return _advanced(self._function, self.struct, projected, segments, states, out)


class CppKeptConvolution:
    """`TorchKeptConvolution`, by an operator."""

    def __init__(self, weights: KeptWeights) -> None:
        self._weights = weights  # keeps what the addresses below point to
        assert all(t is None or t.is_contiguous() for t in (weights.weight, weights.bias))
        width, self._channels = weights.weight.shape
        self.struct = KeptConvolutionStruct(
            weight=weights.weight.data_ptr(),
            bias=None if weights.bias is None else weights.bias.data_ptr(),
            width=width,
            channels=self._channels,
            row_width=weights.row_width,
        )
        self._function = prepared().cpp_kept_convolution

    def __call__(self, projected: Tensor, segments: Segments, states: LayerStates) -> Tensor:
        projected = projected.contiguous()
        out = projected.new_empty(len(projected), self._channels)
        rows, inputs = projected.data_ptr(), states.inputs.data_ptr()
        self._function(TYPES[projected.dtype], self.struct, segments.struct, rows, inputs, out.data_ptr())
        return out


class CppMamba1:
    """`TorchMamba1` by an operator, for states of up to `MOST_KEY_DIM` rows."""

    def __init__(self, weights: Mamba1Weights) -> None:
        self._weights = weights  # keeps what the addresses below point to
        assert all(t.is_contiguous() for t in (weights.rate, weights.bias, weights.skip))
        self.struct = Mamba1Struct(
            channels=weights.channels,
            state_size=weights.state_size,
            rate=weights.rate.data_ptr(),
            bias=weights.bias.data_ptr(),
            skip=weights.skip.data_ptr(),
        )
        self._function = prepared().cpp_mamba1

    def __call__(self, projected: Tensor, segments: Segments, states: LayerStates) -> Tensor:
        projected = projected.contiguous()
        out = projected.new_empty(len(projected), self._weights.channels)
        rows, state = projected.data_ptr(), states.state.data_ptr()
        self._function(TYPES[projected.dtype], self.struct, segments.struct, rows, state, out.data_ptr())
        return out


def _advanced(
    function: Callable[..., None],
    struct: Structure,
    projected: Tensor,
    segments: Segments,
    states: LayerStates,
    out: Tensor,
) -> Tensor:
    """Advance all sequences by their tokens, and return the filled `out`."""
    projected = projected.contiguous()
    function(
        TYPES[projected.dtype],
        struct,
        segments.struct,
        projected.data_ptr(),
        states.inputs.data_ptr(),
        states.state.data_ptr(),
        out.data_ptr(),
    )
    return out


def _gating(gating: Gating | None) -> int:
    """Return `Gating` of mamba2.hpp."""
    if gating is None:
        return 0
    if gating.norm is None:
        return 1
    return 2 if gating.place == "behind gates" else 3


class CppShortConvolution:
    """A `ShortConvolution`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._tensors = weight, bias  # keeps what the addresses below point to
        assert weight.is_contiguous() and (bias is None or bias.is_contiguous())
        width, self._channels = weight.shape
        self.struct = ShortConvolutionStruct(
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            width=width,
            channels=self._channels,
        )
        self._function = prepared().cpp_short_convolution

    def __call__(self, projected: Tensor, segments: Segments, plan: ConvolutionPlan, rows: Tensor) -> Tensor:
        projected = projected.contiguous()
        out = projected.new_empty(len(projected), self._channels)
        self._function(
            TYPES[projected.dtype],
            self.struct,
            segments.struct,
            plan.struct,
            projected.data_ptr(),
            rows.data_ptr(),
            out.data_ptr(),
        )
        return out
