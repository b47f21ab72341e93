"""GPTQ for one matrix (arXiv 2210.17323, Algorithm 1): later columns make up for the error of rounded ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.errors import StartupError

BLOCK = 128  # columns whose errors are added to the rest at a time
_MORE_DAMPING, _ATTEMPTS = 10.0, 4
_SMALLEST_SCALE = 2.0**-24  # of float16


class Hessian:
    """The mean of 2 x xᵀ over samples' inputs x, float32 [in, in], equal shares: how much pairs of inputs matter."""

    def __init__(self, num_columns: int, device: torch.device) -> None:
        self.matrix = torch.zeros(num_columns, num_columns, dtype=torch.float32, device=device)
        # With tokens for this matrix.
        self.num_samples = 0

    def add(self, inputs: Tensor) -> None:
        """Add one sample's inputs [tokens, in]."""
        if not len(inputs):
            return
        inputs = inputs.float()
        self.matrix.mul_(self.num_samples / (self.num_samples + 1))
        self.num_samples += 1
        self.matrix.addmm_(inputs.t(), inputs, alpha=2 / self.num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """How matrices are rounded."""

    bits: int = 4
    # Columns that share a scale; -1: all.
    group: int = 128
    # Of the Hessian's mean diagonal, added to it.
    damping: float = 0.01
    # Columns go by falling activations.
    by_activation: bool = False

    @property
    def middle(self) -> int:
        """The code of zero."""
        return 1 << (self.bits - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """Codes [out, in] uint8, scales [groups, out] float16, each column's group [in] int32."""

    codes: Tensor
    scales: Tensor
    groups: Tensor
    middle: int
    # Of the output over the samples, relative.
    error: float

    def dequantize(self) -> Tensor:
        """[out, in] float32."""
        return (self.codes.float() - self.middle) * self.scales.float().t()[:, self.groups.long()]


def rounded(name: str, weight: Tensor, hessian: Tensor, how: Rounding) -> Rounded:
    """Round weight [out, in] by its hessian [in, in]; zeros round alone.

    Raises:
        StartupError: The Hessian cannot be inverted.
    """
    weight, hessian = weight.float().clone(), hessian.clone()
    if not bool(hessian.any()):
        hessian.fill_diagonal_(1)
    diagonal = hessian.diagonal()
    unused = diagonal == 0
    diagonal[unused] = 1
    weight[:, unused] = 0
    order = diagonal.argsort(descending=True, stable=True) if how.by_activation else torch.arange(len(hessian))
    order = order.to(weight.device)
    hessian = hessian[order][:, order]
    codes, scales, result = _columns(weight[:, order], _factor(name, hessian, how.damping), how)
    error = _energy(weight[:, order] - result, hessian) / max(_energy(weight[:, order], hessian), 1e-30)
    groups = torch.empty(len(order), dtype=torch.int32, device=weight.device)
    groups[order] = torch.arange(len(order), dtype=torch.int32, device=weight.device) // _group(how, len(order))
    back = torch.empty_like(codes)
    back[:, order] = codes
    return Rounded(codes=back, scales=scales, groups=groups, middle=how.middle, error=error)


def _group(how: Rounding, num_columns: int) -> int:
    return num_columns if how.group == -1 else how.group


def _factor(name: str, hessian: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse damped Hessian."""
    mean = float(hessian.diagonal().mean())
    for attempt in range(_ATTEMPTS):
        damped = hessian.clone()
        damped.diagonal().add_(damping * _MORE_DAMPING**attempt * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed.item():
            factor: Tensor
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed.item() and bool(torch.isfinite(factor).all()):
                return factor
    raise StartupError(
        f"the inputs of {name} are too much alike, even with --percdamp "
        f"{damping * _MORE_DAMPING ** (_ATTEMPTS - 1):g}: give more or longer samples"
    )


def _columns(weight: Tensor, factor: Tensor, how: Rounding) -> tuple[Tensor, Tensor, Tensor]:
    """Round columns in order, overwriting `weight`; return codes, scales, and their values."""
    num_rows, num_columns = weight.shape
    group = _group(how, num_columns)
    codes = torch.empty(num_rows, num_columns, dtype=torch.uint8, device=weight.device)
    result = torch.empty_like(weight)
    scales: list[Tensor] = []
    weight = weight.clone()
    for start in range(0, num_columns, BLOCK):
        stop = min(start + BLOCK, num_columns)
        block, inner = weight[:, start:stop], factor[start:stop, start:stop]
        errors = torch.empty_like(block)
        for k in range(stop - start):
            if (start + k) % group == 0:
                end = min(start + k + group, num_columns)
                beyond = weight[:, stop:end] - errors[:, :k] @ factor[start : start + k, stop:end]
                scales.append(_scales(torch.cat([block[:, k : end - start], beyond], dim=1), how.bits))
            scale = scales[-1].float()
            column = block[:, k]
            code = (column / scale).round_().add_(how.middle).clamp_(0, 2**how.bits - 1)
            value = (code - how.middle) * scale
            error = (column - value) / inner[k, k]
            block[:, k + 1 :] -= error.unsqueeze(1) * inner[k, k + 1 :]
            errors[:, k] = error
            codes[:, start + k] = code.to(torch.uint8)
            result[:, start + k] = value
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    return codes, torch.stack(scales), result


def _scales(columns: Tensor, bits: int) -> Tensor:
    """Return [out] float16, so that rows' largest numbers get outermost codes."""
    most = columns.abs().amax(dim=1)
    most = torch.where(most == 0, 1.0, most)
    scales: Tensor = (2 * most / (2**bits - 1)).clamp_min(_SMALLEST_SCALE).half()
    return scales


def _energy(matrix: Tensor, hessian: Tensor) -> float:
    """Return tr(matrix @ hessian @ matrixᵀ)."""
    return float(((matrix @ hessian) * matrix).sum())
