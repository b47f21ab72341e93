"""Gated activations of two halves of a row, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_server.kernels.dependent import after_previous, early_launch

BLOCK = 1024

# The kernel's word for each activation of `layers.activation`.
KINDS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}


def gated(name: str, gate_up: Tensor) -> Tensor:
    """Multiply up by activation(gate), rounded to its type as torch does: [n, 2 * m] to [n, m].

    Args:
        name: A key of `KINDS`.
        gate_up: float16, bfloat16 or float32; its last dimension contiguous.
    """
    return _gated(gate_up, KINDS[name], 0.0, 0.0)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Compute `layers.activation.clamped_swiglu` (GPT-OSS) with one rounding, in the shapes of `gated`."""
    return _gated(gate_up, "clamped_swiglu", alpha, limit)


def _gated(gate_up: Tensor, kind: str, alpha: float, limit: float) -> Tensor:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"no kernel for an activation of shape {tuple(gate_up.shape)}, strides {gate_up.stride()}")
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        gated_rows[(num_rows, triton.cdiv(size, BLOCK))](
            gate_up, out, size, gate_up.stride(0), alpha, limit, KIND=kind, BLOCK=BLOCK, **early_launch(gate_up.device)
        )
    return out


@triton.jit
def gated_rows(
    gate_up, out, size, stride, alpha, limit, KIND: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    after_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    first = gate_up + row * stride + column
    gate = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(first + size, mask=mask, other=0.0).to(tl.float32)
    # Bounds by comparison, which lets NaN through as torch does.
    if KIND == "clamped_swiglu":
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        active = gate * tl.sigmoid(alpha * gate)
    else:
        active = _activate(gate, KIND).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + column, (active * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == "silu":
        result = x * tl.sigmoid(x)
    elif KIND == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) * (x + 0.044715 * x^3)
        result = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "quick_gelu":
        result = x * tl.sigmoid(1.702 * x)
    elif KIND == "relu":
        result = tl.where(x < 0.0, 0.0, x)
    else:
        tl.static_assert(KIND == "relu2")
        result = tl.where(x < 0.0, 0.0, x)
        result = result * result
    return result
