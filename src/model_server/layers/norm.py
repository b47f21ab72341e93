"""Normalisation over the last dimension."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.distributed.group import ProcessGroup

# [..., n] -> the same shape and dtype, never in place.
Norm = Callable[[Tensor], Tensor]


class AddNorm(Protocol):
    """A norm that also adds to the residual stream."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Return `hidden + added`, perhaps in the memory of `added`, and its norm."""


class RmsNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` in float32 inside, as LlamaRMSNorm; weight [n] or [heads, n]."""

    # Written as `x / hypot(|x|, sqrt(n * eps)) * (sqrt(n) * weight)`, the same number in four short operators; torch's
    # `rms_norm` takes six on a CPU, and twice the time on a few rows.
    __slots__ = ("_floor", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self._weight = weight.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        result = torch.div(x, torch.hypot(length, self._floor)).mul_(self._weight)
        return result if result.dtype == x.dtype else result.to(x.dtype)

    def add(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        added.add_(hidden)
        return added, self(added)


class LayerNorm:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, as RmsNorm."""

    __slots__ = ("bias", "eps", "weight")

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is None or self.weight.dim() == 1:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        result = F.layer_norm(x, x.shape[-1:], None, None, self.eps).mul_(self.weight)
        return result if self.bias is None else result.add_(self.bias)

    def add(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        added.add_(hidden)
        return added, self(added)


class OfWideStream:
    """A norm of a float32 residual stream, in the model's type."""

    __slots__ = ("_dtype", "_norm", "_rounds_first")

    # rounds_first: it reads the rounded stream, as transformers' blocks do; the last norm reads it as it is.

    def __init__(self, norm: Norm, dtype: torch.dtype, *, rounds_first: bool) -> None:
        self._norm = norm
        self._dtype = dtype
        self._rounds_first = rounds_first

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x.to(self._dtype)) if self._rounds_first else self._norm(x).to(self._dtype)

    def add(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        total = hidden + added
        return total, self(total)


class WideRmsNorm:
    """RMS norms over a token's whole query and whole key, of all ranks; weight, x: [.., num_heads + num_kv_heads,
    head_dim].
    """

    __slots__ = ("_counts", "_eps", "_group", "_num_heads", "_sizes", "_weight")

    def __init__(self, weight: Tensor, num_heads: int, eps: float, tensor_group: ProcessGroup) -> None:
        count, head_dim = weight.shape
        num_kv_heads = count - num_heads
        self._weight = weight.float()
        self._num_heads = num_heads
        self._sizes = weight.new_tensor(
            [num_heads * head_dim * tensor_group.size, num_kv_heads * head_dim * tensor_group.size], dtype=torch.float32
        )
        self._eps = eps
        self._group = tensor_group
        self._counts = torch.tensor([num_heads, num_kv_heads], device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        # A key head that several ranks hold is counted by each of them, in the sum as in the size.
        squares = x.float().square().sum(dim=-1)
        sums = torch.stack((squares[:, : self._num_heads].sum(1), squares[:, self._num_heads :].sum(1)), dim=1)
        factors = self._group.all_reduce(sums).div_(self._sizes).add_(self._eps).rsqrt_()
        per_head = factors.repeat_interleave(self._counts, dim=1, output_size=self._weight.shape[0])
        return (x.float() * per_head.unsqueeze(-1)).mul_(self._weight).to(x.dtype)
