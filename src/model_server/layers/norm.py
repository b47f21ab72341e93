"""Root-mean-square normalisation over the last dimension."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class RmsNorm:
    """`x / sqrt(mean(x^2) + eps) * weight`, in float32 inside (transformers' LlamaRMSNorm).

    Written as `x / hypot(|x|, sqrt(n * eps)) * (sqrt(n) * weight)`, which is the same number in four short operators;
    torch's own `rms_norm` takes six on a CPU and twice the time on a few rows.

    weight: [n], or [heads, n] for one weight per head; x: [..., n] or [..., heads, n].
    """

    __slots__ = ("_floor", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self._weight = weight.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        result = torch.div(x, torch.hypot(length, self._floor)).mul_(self._weight)
        return result if result.dtype == x.dtype else result.to(x.dtype)
