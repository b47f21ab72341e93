"""GPTQ for one matrix (arXiv 2210.17323, Algorithm 1): later columns make up for the error of rounded ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
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
        self._sum = torch.zeros(num_columns, num_columns, dtype=torch.float32, device=device)
        # With tokens for this matrix.
        self.num_samples = 0

    @property
    def matrix(self) -> Tensor:
        """Return a new one."""
        return self._sum * (2 / max(self.num_samples, 1))

    def add(self, inputs: Tensor) -> None:
        """Add one sample's inputs [tokens, in]."""
        if not len(inputs):
            return
        self.num_samples += 1
        with _exact_in_bfloat16(inputs.dtype):
            inputs = inputs.float()
            self._sum.addmm_(inputs.t(), inputs)


@contextlib.contextmanager
def _exact_in_bfloat16(dtype: torch.dtype) -> Iterator[None]:
    """Let a CPU multiply numbers of bfloat16 as such: products are exact, and sums stay float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if dtype is torch.bfloat16 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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


def rounded(weights: Mapping[str, Tensor], hessian: Tensor, how: Rounding) -> dict[str, Rounded]:
    """Round matrices [out, in] of the same inputs, by name, by their hessian [in, in]; zeros round alone.

    Raises:
        StartupError: The Hessian cannot be inverted.
    """
    # Each row is rounded on its own: all of them take the steps from column to column together.
    weight, hessian = torch.cat([weight.float() for weight in weights.values()]), hessian.clone()
    if not bool(hessian.any()):
        hessian.fill_diagonal_(1)
    diagonal = hessian.diagonal()
    unused = diagonal == 0
    diagonal[unused] = 1
    weight[:, unused] = 0
    group = _group(how, len(diagonal))
    order = _by_activation(diagonal) if how.by_activation else _by_activation_within_groups(diagonal, group)
    hessian = hessian[order][:, order]
    ordered = weight.t()[order]
    codes, scales, result = _columns(ordered.clone(), _factor(", ".join(weights), hessian, how.damping), how)
    groups = torch.arange(len(order), dtype=torch.int32, device=weight.device) // group
    if how.by_activation:
        groups[order] = groups.clone()
    else:
        scales = scales[(order[::group] // group).argsort()]
    back = torch.empty_like(codes)
    back[order] = codes
    lost, all_of_it = _energies(ordered - result, hessian), _energies(ordered, hessian)
    found, start = {}, 0
    for name, one in weights.items():
        rows = slice(start, start + len(one))
        found[name] = Rounded(
            codes=back[:, rows].t().contiguous(), scales=scales[:, rows], groups=groups.clone(), middle=how.middle,
            error=float(lost[rows].sum()) / max(float(all_of_it[rows].sum()), 1e-30),
        )  # fmt: skip
        start = rows.stop
    return found


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
    """Round columns [in, out] in order, overwriting `weight`; return codes, scales, and their values."""
    num_columns, num_rows = weight.shape
    group = _group(how, num_columns)
    codes = torch.empty(num_columns, num_rows, dtype=torch.uint8, device=weight.device)
    result = torch.empty_like(weight)
    scales: list[Tensor] = []
    least, most, diagonal = -how.middle, how.middle - 1, factor.diagonal().tolist()
    for start in range(0, num_columns, BLOCK):
        stop = min(start + BLOCK, num_columns)
        errors = torch.empty(stop - start, num_rows, dtype=weight.dtype, device=weight.device)
        for number in range(start, stop):
            # What the block's columns before this one left is taken off here, of later blocks below.
            before = slice(start, number)
            done = errors[: number - start]
            if number % group == 0:
                end = min(number + group, num_columns)
                columns = torch.addmm(weight[number:end], factor[before, number:end].t(), done, alpha=-1)
                scales.append(_scales(columns, factor.diagonal()[number:end], how.bits))
                scale = scales[-1].float()
            column = torch.addmv(weight[number], done.t(), factor[before, number], alpha=-1)
            code = (column / scale).round_().clamp_(least, most)
            codes[number] = code + how.middle
            value = torch.mul(code, scale, out=result[number])
            torch.sub(column, value, out=errors[number - start]).div_(diagonal[number])
        weight[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
    return codes, torch.stack(scales), result


def _scales(columns: Tensor, factor: Tensor, bits: int) -> Tensor:
    """Choose the scales with the least error [out] float16 for [in, out], a column's weighed by its factor's diagonal.

    They are shares of those that give rows' largest numbers outermost codes, with 8 bits these themselves.
    """
    most = columns.abs().amax(dim=0)
    most = torch.where(most == 0, 1.0, most)
    widest = 2 * most / (2**bits - 1)
    best = _half(widest)
    if bits > _SEARCHED_BITS:
        return best
    weights, middle = factor.reciprocal().square(), 1 << (bits - 1)
    least = torch.full_like(most, torch.inf)
    values = torch.empty_like(columns)
    for share in SHARES:
        scale = _half(widest * share)
        wide = scale.float()
        torch.div(columns, wide, out=values).round_().clamp_(-middle, middle - 1).mul_(wide)
        error = weights @ values.sub_(columns).square_()
        is_less = error < least
        best, least = torch.where(is_less, scale, best), torch.where(is_less, error, least)
    return best


def _half(scales: Tensor) -> Tensor:
    return scales.clamp_min(_SMALLEST_SCALE).half()


def _energies(columns: Tensor, hessian: Tensor) -> Tensor:
    """Return w @ hessian @ wᵀ [out] of each row w of a matrix, given as columns [in, out]."""
    return (hessian @ columns).mul_(columns).sum(dim=0)
