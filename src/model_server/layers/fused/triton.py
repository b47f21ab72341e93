"""The fused operators as Triton kernels; imported only if `kernels.availability.usable`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from model_server.kernels import activation, norm
from model_server.kernels.availability import has_float8
from model_server.kernels.cache_writes.latent import latent_write
from model_server.kernels.cache_writes.rope import rotate_write
from model_server.kernels.moe.routing import route
from model_server.layers.activation import Activation
from model_server.layers.activation import activation as served
from model_server.layers.fused.fused import HeadLayout
from model_server.layers.fused.torch import TorchFused, norm_heads
from model_server.layers.norm import AddNorm, Norm
from model_server.layers.rotary import Rotations
from model_server.layers.routing import TINY, Choice, Routing, choose


class TritonRmsNorm:
    """`layers.norm.RmsNorm`."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight.float().contiguous()
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return norm.rms_norm(x, self.weight, self.eps)

    def add(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        return norm.add_rms_norm(hidden, added, self.weight, self.eps)


class TritonLayerNorm:
    """`layers.norm.LayerNorm`."""

    __slots__ = ("_bias", "_eps", "_weight")

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self._weight, self._bias = (None if t is None else t.float().contiguous() for t in (weight, bias))
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return norm.layer_norm(x, self._weight, self._bias, self._eps)

    def add(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        return norm.add_layer_norm(hidden, added, self._weight, self._bias, self._eps)


class TritonFused:
    """One kernel for each operator, in float16, bfloat16 and float32."""

    def __init__(self, device: torch.device) -> None:
        self._stores_float8 = has_float8(device)

    def rms_norm(self, weight: Tensor, eps: float) -> AddNorm:
        return TritonRmsNorm(weight, eps)

    def layer_norm(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> AddNorm:
        return TritonLayerNorm(weight, bias, eps)

    def gated(self, name: str) -> Activation:
        served(name)  # says which names there are
        return partial(activation.gated, name)

    def clamped_swiglu(self, alpha: float, limit: float) -> Activation:
        return partial(activation.clamped_swiglu, alpha=alpha, limit=limit)

    def route(self, routing: Routing, correction: Tensor | None) -> Choice:
        if routing.score == "sparse_mixer" or routing.norm not in (None, 1.0, 2.0) or routing.guard != TINY:
            return partial(choose, routing=routing, correction=correction)
        return partial(
            route,
            correction=correction,
            top_k=routing.top_k,
            softmax=routing.score == "softmax",
            num_groups=routing.num_groups,
            top_groups=routing.top_groups,
            best_two=routing.group_score == "best_two",
            norm=int(routing.norm or 0),
            scaling=routing.scaling,
        )

    def rotate_write(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        qk_norm: Norm | None,
        rotations: Rotations | None,
        rows: Tensor,
        slots: Tensor,
    ) -> None:
        if rows.dtype is not qkv.dtype and not self._stores_float8:
            TorchFused().rotate_write(qkv, layout, qk_norm, rotations, rows, slots)
            return
        weight, eps = None, 0.0
        if isinstance(qk_norm, TritonRmsNorm):
            weight, eps = qk_norm.weight, qk_norm.eps
        elif qk_norm is not None:
            norm_heads(qkv, layout, qk_norm)
        rotate_write(
            qkv,
            rows,
            slots,
            num_heads=layout.num_heads,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            table=None if rotations is None else rotations.real_table,
            positions=None if rotations is None else rotations.positions,
            weight=weight,
            eps=eps,
            key_scale=layout.key_scale,
            value_scale=layout.value_scale,
        )

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
        if rows.dtype is not latent.dtype and not self._stores_float8:
            return TorchFused().latent_write(latent, norm, rotated, turned, rotations, rows, slots)
        assert isinstance(norm, TritonRmsNorm)
        return latent_write(
            latent, norm.weight, norm.eps, rotated, turned, rotations.real_table, rotations.positions, rows, slots
        )
