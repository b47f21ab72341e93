"""GPTQ for one matrix (arXiv 2210.17323, Algorithm 1): later columns make up for the error of rounded ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.errors import StartupError

BLOCK = 128  # columns whose errors are added to the rest at a time
_MORE_DAMPING, _ATTEMPTS = 10.0, 4
_SMALLEST_SCALE = 2.0**-24  # of float16
_SEARCHED_BITS = 4  # to which scales are searched
# Of the scale with which no number is cut.
SHARES = tuple(1.08 - 0.02 * step for step in range(29))


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
    group = _group(how, len(diagonal))
    order = _by_activation(diagonal) if how.by_activation else _by_activation_within_groups(diagonal, group)
    hessian = hessian[order][:, order]
    codes, scales, result = _columns(weight[:, order], _factor(name, hessian, how.damping), how)
    error = _energy(weight[:, order] - result, hessian) / max(_energy(weight[:, order], hessian), 1e-30)
    groups = torch.arange(len(order), dtype=torch.int32, device=weight.device) // group
    if how.by_activation:
        groups[order] = groups.clone()
    else:
        scales = scales[(order[::group] // group).argsort()]
    back = torch.empty_like(codes)
    back[:, order] = codes
    return Rounded(codes=back, scales=scales, groups=groups, middle=how.middle, error=error)


def _group(how: Rounding, num_columns: int) -> int:
    return num_columns if how.group == -1 else how.group


def _by_activation(diagonal: Tensor) -> Tensor:
    """Return the columns by falling activations: the rest makes up for what matters most."""
    return diagonal.argsort(descending=True, stable=True)


def _by_activation_within_groups(diagonal: Tensor, group: int) -> Tensor:
    """Return the groups by falling activations, and each one's columns so; a short group stays last."""
    whole = len(diagonal) // group * group
    by_group = diagonal[:whole].view(-1, group)
    within = by_group.argsort(dim=1, descending=True, stable=True)
    within += torch.arange(0, whole, group, device=diagonal.device).unsqueeze(1)
    last = whole + _by_activation(diagonal[whole:])
    return torch.cat([within[_by_activation(by_group.sum(dim=1))].flatten(), last])


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
                columns = torch.cat([block[:, k : end - start], beyond], dim=1)
                scales.append(_scales(columns, factor.diagonal()[start + k : end], how.bits))
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


def _scales(columns: Tensor, factor: Tensor, bits: int) -> Tensor:
    """Choose the scales with the least error [out] float16, a column's weighed by the diagonal of its factor.

    They are shares of those that give rows' largest numbers outermost codes, with 8 bits these themselves.
    """
    most = columns.abs().amax(dim=1)
    most = torch.where(most == 0, 1.0, most)
    widest = 2 * most / (2**bits - 1)
    best = _half(widest)
    if bits > _SEARCHED_BITS:
        return best
    weights, middle = factor.reciprocal().square(), 1 << (bits - 1)
    least = torch.full_like(most, torch.inf)
    for share in SHARES:
        scale = _half(widest * share)
        wide = scale.float().unsqueeze(1)
        values = (columns / wide).round_().clamp_(-middle, middle - 1).mul_(wide)
        error = values.sub_(columns).square_() @ weights
        is_less = error < least
        best, least = torch.where(is_less, scale, best), torch.where(is_less, error, least)
    return best


def _half(scales: Tensor) -> Tensor:
    return scales.clamp_min(_SMALLEST_SCALE).half()


def _energy(matrix: Tensor, hessian: Tensor) -> float:
    """Return tr(matrix @ hessian @ matrixᵀ)."""
    return float(((matrix @ hessian) * matrix).sum())
