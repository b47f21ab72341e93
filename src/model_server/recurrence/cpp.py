"""Recurrent layers by the C++ operators: one call between a layer's products.

A token's sums are taken in one order, so that no bit depends on how prompts are cut or on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model_server.cpp.library import TYPES, prepared
from model_server.cpp.structs import GatedDeltaStruct, ShortConvolutionStruct
from model_server.recurrence.delta_net import DeltaWeights
from model_server.recurrence.segments import ConvolutionPlan, Segments
from model_server.recurrence.states import LayerStates

# MOST_KEY_DIM of gated_delta.hpp.
MOST_KEY_DIM = 512


class CppDeltaNet:
    """A `DeltaNet`, for keys of up to `MOST_KEY_DIM` numbers."""

    def __init__(self, weights: DeltaWeights) -> None:
        self._weights = weights  # keeps what the addresses below point to
        tensors = weights.convolution, weights.rate, weights.bias, weights.norm
        assert all(t.is_contiguous() and t.dtype == torch.float32 for t in tensors)
        self._struct = GatedDeltaStruct(
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
        )
        self._function = prepared().cpp_gated_delta

    def __call__(self, projected: Tensor, segments: Segments, states: LayerStates) -> Tensor:
        projected = projected.contiguous()
        out = projected.new_empty(len(projected), self._weights.values)
        self._function(
            TYPES[projected.dtype],
            self._struct,
            segments.struct,
            projected.data_ptr(),
            states.inputs.data_ptr(),
            states.state.data_ptr(),
            out.data_ptr(),
        )
        return out


class CppShortConvolution:
    """A `ShortConvolution`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._tensors = weight, bias  # keeps what the addresses below point to
        assert weight.is_contiguous() and (bias is None or bias.is_contiguous())
        width, self._channels = weight.shape
        self._struct = ShortConvolutionStruct(
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
            self._struct,
            segments.struct,
            plan.struct,
            projected.data_ptr(),
            rows.data_ptr(),
            out.data_ptr(),
        )
        return out
