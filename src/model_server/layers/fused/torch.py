"""The fused element-wise operators in plain torch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from model_server.layers.activation import Activation, clamped_swiglu, gated
from model_server.layers.fused.fused import HeadLayout
from model_server.layers.norm import AddNorm, LayerNorm, Norm, RmsNorm
from model_server.layers.rotary import Rotations, rotate_
from model_server.layers.routing import Choice, Routing, choose
from model_server.memory.kv_cache import copy_rows


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

    def route(self, routing: Routing, correction: Tensor | None) -> Choice:
        return partial(choose, routing=routing, correction=correction)

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
        if layout.key_scale != 1.0 or layout.value_scale != 1.0:
            stored = _scaled(stored, layout)
        copy_rows(rows, slots, stored)

    def latent_write(
        self,
        latent: Tensor,
        norm: Norm,
        rotated: Tensor,
        turned: Tensor,
        rotations: Rotations,
        rows: Tensor,
        slots: Tensor,
    ) -> Tensor:
        rank = latent.shape[1] - rotated.shape[2]
        keys = torch.cat((norm(latent[:, :rank]), latent[:, rank:]), dim=1)
        rotate_(keys[:, rank:].unsqueeze(1), rotations.gathered)
        copy_rows(rows, slots, keys)
        turned.copy_(rotated)
        rotate_(turned, rotations.gathered)
        return keys


def norm_heads(qkv: Tensor, layout: HeadLayout, qk_norm: Norm) -> None:
    """Norm query and key heads in place, by norms that fused operators do not know."""
    heads = _rotated_heads(qkv, layout)
    heads.copy_(qk_norm(heads))


def _rotated_heads(qkv: Tensor, layout: HeadLayout) -> Tensor:
    """View query and key heads [n, num_heads + num_kv_heads, head_dim]."""
    num_rotated, dim = layout.num_heads + layout.num_kv_heads, layout.head_dim
    return qkv[:, : num_rotated * dim].view(qkv.shape[0], num_rotated, dim)


def _scaled(stored: Tensor, layout: HeadLayout) -> Tensor:
    """Divide keys and values [n, 2 * num_kv_heads * head_dim] by their scales, in float32."""
    width = layout.num_kv_heads * layout.head_dim
    return torch.cat((stored[:, :width].float() / layout.key_scale, stored[:, width:].float() / layout.value_scale), 1)
