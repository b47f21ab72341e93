"""The fused element-wise operators in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from model_server.layers.activation import Activation, clamped_swiglu, gated
from model_server.layers.fused.fused import HeadLayout
from model_server.layers.norm import AddNorm, LayerNorm, Norm, RmsNorm
from model_server.layers.rotary import Rotations, rotate_


class TorchFused:
    """For any device and type."""

    def rms_norm(self, weight: Tensor, eps: float) -> AddNorm:
        return RmsNorm(weight, eps)

    def layer_norm(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> AddNorm:
        return LayerNorm(weight, bias, eps)

    def gated(self, name: str) -> Activation:
        return gated(name)

    def clamped_swiglu(self, alpha: float, limit: float) -> Activation:
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
        if qk_norm is not None:
            norm_heads(qkv, layout, qk_norm)
        if rotations is not None:
            rotate_(_rotated_heads(qkv, layout)[..., : layout.rotary_dim], rotations.gathered)
        stored = qkv[:, layout.num_heads * layout.head_dim :]
        if rows.dtype is qkv.dtype:
            rows.index_copy_(0, slots, stored)
        else:
            _store_float8(stored, layout, rows, slots)


def norm_heads(qkv: Tensor, layout: HeadLayout, qk_norm: Norm) -> None:
    """Norm query and key heads in place: for every norm that a fused operator does not know."""
    heads = _rotated_heads(qkv, layout)
    heads.copy_(qk_norm(heads))


def _rotated_heads(qkv: Tensor, layout: HeadLayout) -> Tensor:
    """Query and key heads [n, num_heads + num_kv_heads, head_dim], a view."""
    num_rotated, dim = layout.num_heads + layout.num_kv_heads, layout.head_dim
    return qkv[:, : num_rotated * dim].view(qkv.shape[0], num_rotated, dim)


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
