"""The fused operators in C++, for CPUs; what they do not know stays with plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from model_server.cpp.library import TYPES, prepared, without_gil_release
from model_server.cpp.structs import HeadLayoutStruct
from model_server.layers.activation import Activation
from model_server.layers.fused.fused import HeadLayout
from model_server.layers.fused.torch import TorchFused, norm_heads
from model_server.layers.norm import AddNorm, Norm
from model_server.layers.rotary import Rotations

# Rows of a decode step, whose norms and activations take microseconds.
FEW_ROWS = 32


class CppFused(TorchFused):
    """For what `cpp.library.usable` serves."""

    def rms_norm(self, weight: Tensor, eps: float) -> AddNorm:
        return CppRmsNorm(weight, eps)

    def gated(self, name: str) -> Activation:
        return CppSiluGated() if name in ("silu", "swish") else super().gated(name)

    def rotate_write(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        qk_norm: Norm | None,
        rotations: Rotations | None,
        rows: Tensor,
        slots: Tensor,
    ) -> None:
        if rows.dtype != qkv.dtype or not qkv.is_contiguous():
            super().rotate_write(qkv, layout, qk_norm, rotations, rows, slots)
            return
        dim, num_rotated = layout.head_dim, layout.num_heads + layout.num_kv_heads
        known = qk_norm if isinstance(qk_norm, CppRmsNorm) and qk_norm.weight.dim() == 2 else None
        if qk_norm is not None and known is None:
            norm_heads(qkv, layout, qk_norm)
        struct = HeadLayoutStruct(
            num_rotated=num_rotated,
            head_dim=dim,
            rotary=layout.rotary_dim,
            query_width=layout.num_heads * dim,
            qkv_width=qkv.shape[1],
            norm=None if known is None else known.weight.data_ptr(),
            eps=0.0 if known is None else known.eps,
        )
        prepared().cpp_rotate_write(
            TYPES[qkv.dtype],
            qkv.data_ptr(),
            struct,
            None if rotations is None else rotations.gathered.data_ptr(),
            rows.data_ptr(),
            rows.shape[1],
            slots.data_ptr(),
            qkv.shape[0],
        )


class CppRmsNorm:
    """`layers.norm.RmsNorm` with float32 weights [n] or [heads, n]."""

    __slots__ = ("_function", "_holding_gil", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight.float().contiguous()
        self.eps = eps
        self._function = prepared().cpp_rms_norm
        self._holding_gil = without_gil_release().cpp_rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x.contiguous(), None)

    def add(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        assert added.is_contiguous()
        return added, self._run(added, hidden.contiguous())

    def _run(self, x: Tensor, onto: Tensor | None) -> Tensor:
        width = self.weight.shape[-1]
        if x.shape[-1] % width or (onto is not None and (onto.shape != x.shape or onto.dtype != x.dtype)):
            raise RuntimeError(f"a norm of width {width} over {list(x.shape)} {x.dtype}")
        out = torch.empty_like(x)
        function = self._holding_gil if x.shape[0] <= FEW_ROWS else self._function
        function(
            TYPES[x.dtype],
            x.data_ptr(),
            None if onto is None else onto.data_ptr(),
            self.weight.data_ptr(),
            self.weight.numel() // width,
            self.eps,
            out.data_ptr(),
            x.numel() // width,
            width,
        )
        return out


class CppSiluGated:
    """silu(gate) * up, from [n, 2 * m] to [n, m]."""

    __slots__ = ("_function",)

    def __init__(self) -> None:
        self._function = prepared().cpp_silu_gated

    def __call__(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[-1] // 2
        source = gate_up.contiguous()
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        self._function(TYPES[source.dtype], source.data_ptr(), out.data_ptr(), out.numel() // width, width)
        return out
