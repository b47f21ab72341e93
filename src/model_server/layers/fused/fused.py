"""Element-wise work between two matrix products, each chain of it behind one call.

A device may do such a chain in one kernel. What it has to give is in `TorchFused`, the arithmetic in plain torch that
every other implementation is held to. Implementations are chosen once, when a model is loaded: `fused_for`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_server.cpp.library import usable as native_usable
from model_server.kernels.availability import usable as kernels_usable
from model_server.layers.activation import Activation, clamped_swiglu, gated
from model_server.layers.norm import AddNorm, LayerNorm, Norm, RmsNorm
from model_server.layers.rotary import Rotations, rotate_


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """What a row of queries, keys and values holds, [num_heads + 2 * num_kv_heads, head_dim], and how it is stored.

    rotary_dim: how many numbers at the front of a query or key head rotate, pairs side by side; 0: none.
    key_scale, value_scale: what the numbers of a cache of float8 are multiplied by when they are read.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    key_scale: float = 1.0
    value_scale: float = 1.0


class Fused(Protocol):
    """A device's way to do the chains. Of what is made here, weights and constants are prepared at loading."""

    def rms_norm(self, weight: Tensor, eps: float) -> AddNorm:
        """`layers.norm.RmsNorm`. weight: [n], or [heads, n] for one weight per head, of any floating type."""

    def layer_norm(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> AddNorm:
        """`layers.norm.LayerNorm`. weight and bias as for `rms_norm`, or None."""

    def gated(self, name: str) -> Activation:
        """[n, 2 * m] (gate, then up) -> [n, m]: activation(gate) * up. Raises StartupError for an unknown name."""

    def clamped_swiglu(self, alpha: float, limit: float) -> Activation:
        """`layers.activation.clamped_swiglu`: [n, 2 * m] (gate, then up) -> [n, m]."""

    def rotate_write(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        qk_norm: Norm | None,
        rotations: Rotations | None,
        rows: Tensor,
        slots: Tensor,
    ) -> None:
        """Norm and rotate queries and keys in place, and store keys and values in the cache.

        qkv: [n, (num_heads + 2 * num_kv_heads) * head_dim], only its last dimension need be contiguous; qk_norm: over
        [n, num_heads + num_kv_heads, head_dim]; rotations: of the n tokens, None without any; rows: a layer's part of
        the cache [num_slots, 2 * num_kv_heads * head_dim], in the type of qkv or in float8; slots: [n] int64.
        """


class TorchFused:
    """Plain torch, on any device and for any type."""

    def rms_norm(self, weight: Tensor, eps: float) -> AddNorm:
        """See `Fused`."""
        return RmsNorm(weight, eps)

    def layer_norm(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> AddNorm:
        """See `Fused`."""
        return LayerNorm(weight, bias, eps)

    def gated(self, name: str) -> Activation:
        """See `Fused`."""
        return gated(name)

    def clamped_swiglu(self, alpha: float, limit: float) -> Activation:
        """See `Fused`."""
        return clamped_swiglu(alpha, limit)

    def rotate_write(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        qk_norm: Norm | None,
        rotations: Rotations | None,
        rows: Tensor,
        slots: Tensor,
    ) -> None:
        """See `Fused`."""
        num_rotated, dim = layout.num_heads + layout.num_kv_heads, layout.head_dim
        heads = qkv[:, : num_rotated * dim].view(qkv.shape[0], num_rotated, dim)
        if qk_norm is not None:
            heads.copy_(qk_norm(heads))
        if rotations is not None:
            rotate_(heads if layout.rotary_dim == dim else heads[..., : layout.rotary_dim], rotations.gathered)
        stored = qkv[:, layout.num_heads * dim :]
        if rows.dtype is qkv.dtype:
            rows.index_copy_(0, slots, stored)
        else:
            _store_float8(stored, layout, rows, slots)


def _store_float8(stored: Tensor, layout: HeadLayout, rows: Tensor, slots: Tensor) -> None:
    """Divided by their scales, rounded to the nearest, bounded by the largest number of the type."""
    width = layout.num_kv_heads * layout.head_dim
    scaled = stored.float()
    if scaled is stored:
        scaled = stored.clone()
    scaled[:, :width] /= layout.key_scale
    scaled[:, width:] /= layout.value_scale
    bound = torch.finfo(rows.dtype).max
    # As bytes: torch copies rows by index in whole bytes on every device, in float8 only on some.
    rows.view(torch.uint8).index_copy_(0, slots, scaled.clamp_(-bound, bound).to(rows.dtype).view(torch.uint8))


def fused_for(device: torch.device, dtype: torch.dtype) -> Fused:
    """The quickest implementation for a model of that type on that device."""
    if kernels_usable(device) and dtype in (torch.float16, torch.bfloat16, torch.float32):
        from model_server.layers.fused.triton import TritonFused

        return TritonFused(device)
    if native_usable(device, dtype):
        from model_server.layers.fused.cpp import NativeFused

        return NativeFused()
    return TorchFused()
