"""One matrix: as a plain reading of the algorithm in float64, and better than rounding each number alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantize import solver
from model_server.quantize.solver import SHARES, Hessian, Rounded, Rounding, rounded

ROWS, COLUMNS = 24, 320


def inputs(seed: int, columns: int = COLUMNS) -> Tensor:
    """Columns that are alike in part, with unequal sizes, so that errors can be made up for."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(400, 40, generator=generator) @ torch.randn(40, columns, generator=generator)
    return (mixed + torch.randn(400, columns, generator=generator)) * torch.rand(columns, generator=generator)


def alone(name: str, weight: Tensor, hessian: Tensor, how: Rounding) -> Rounded:
    return rounded({name: weight}, hessian, how)[name]


def hessian_of(x: Tensor) -> Tensor:
    found = Hessian(x.shape[1], x.device)
    for sample in x.split(50):
        found.add(sample)
    return found.matrix


def order_of(diagonal: Tensor, how: Rounding, group: int) -> Tensor:
    """Columns by falling activations; or whole groups by the sum of theirs, and the columns within each one."""
    columns = range(len(diagonal))
    if how.by_activation:
        return torch.tensor(sorted(columns, key=lambda column: -float(diagonal[column])))
    sums = diagonal[: len(diagonal) // group * group].view(-1, group).sum(1)

    def rank(column: int) -> tuple[float, float]:
        number = column // group  # a short group is last
        return (-float(sums[number]) if number < len(sums) else 1.0), -float(diagonal[column])

    return torch.tensor(sorted(columns, key=rank))


def scale_of(columns: Tensor, factor: Tensor, how: Rounding) -> Tensor:
    """Of several scales for a row that with the least error, by what each column's costs; 8 bits cut nothing."""
    widest = 2 * columns.abs().amax(1) / (2**how.bits - 1)
    shares = (1.0,) if how.bits == 8 else SHARES
    scales = torch.stack([(widest * share).half().double() for share in shares])
    values = (columns / scales[:, :, None]).round().clamp(-how.middle, how.middle - 1) * scales[:, :, None]
    errors = ((values - columns) / factor).square().sum(2)
    return scales.gather(0, errors.argmin(0, keepdim=True))[0]


def by_the_book(weight: Tensor, hessian: Tensor, how: Rounding) -> tuple[Tensor, Tensor]:
    """One column after the other, without blocks: codes, and what they stand for."""
    weight, hessian = weight.double(), hessian.double()
    group = len(hessian) if how.group == -1 else how.group
    order = order_of(hessian.diagonal(), how, group)
    weight, hessian = weight[:, order].clone(), hessian[order][:, order]
    hessian = hessian + how.damping * hessian.diagonal().mean() * torch.eye(len(hessian))
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    codes, result = torch.empty_like(weight), torch.empty_like(weight)
    for k in range(len(hessian)):
        if k % group == 0:
            scale = scale_of(weight[:, k : k + group], factor.diagonal()[k : k + group], how)
        codes[:, k] = (weight[:, k] / scale).round().add(how.middle).clamp(0, 2**how.bits - 1)
        result[:, k] = (codes[:, k] - how.middle) * scale
        error = (weight[:, k] - result[:, k]) / factor[k, k]
        weight[:, k + 1 :] -= error[:, None] * factor[k, k + 1 :]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return codes[:, back], result[:, back]


def error(weight: Tensor, other: Tensor, x: Tensor) -> float:
    return float((x @ (weight - other).t()).square().sum() / (x @ weight.t()).square().sum())


@pytest.mark.parametrize("by_activation", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (4, -1), (8, 64), (4, 48)])
def test_as_by_the_book(bits: int, group: int, by_activation: bool) -> None:
    x, weight = inputs(1), torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(2))
    how = Rounding(bits=bits, group=group, by_activation=by_activation)
    found = alone("m", weight, hessian_of(x), how)
    codes, result = by_the_book(weight, hessian_of(x), how)
    # A number that float32 puts on the other side of a half changes all that follow in its row, by a step at most.
    assert float((found.codes == codes).float().mean()) > 0.97
    value = found.dequantize()
    assert value.shape == weight.shape
    wanted = error(weight, result.float(), x)
    assert error(weight, value, x) == pytest.approx(wanted, rel=0.05)
    assert found.error == pytest.approx(error(weight, value, x), rel=0.05)


def test_better_than_each_number_alone() -> None:
    x, weight = inputs(3), torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(4))
    found = alone("m", weight, hessian_of(x), Rounding())
    nothing = alone("m", weight, torch.zeros(COLUMNS, COLUMNS), Rounding())
    assert error(weight, found.dequantize(), x) < 0.6 * error(weight, nothing.dequantize(), x)
    scale = nothing.scales.float().t()[:, nothing.groups.long()]
    nearest = (weight / scale).round().clamp(-8, 7) * scale
    assert bool(((nothing.dequantize() - nearest).abs() <= scale * 0.02).float().mean() > 0.999), "the nearest code"


@pytest.mark.parametrize("better", ["order", "scales"])
def test_order_and_scales_lessen_the_error(better: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = inputs(8), torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(9))
    how = Rounding(group=64)
    found = alone("m", weight, hessian_of(x), how).error
    if better == "order":
        monkeypatch.setattr(solver, "_by_activation_within_groups", lambda diagonal, group: torch.arange(COLUMNS))
    else:
        monkeypatch.setattr(solver, "SHARES", (1.0,))
    assert found < 0.97 * alone("m", weight, hessian_of(x), how).error


def test_columns_that_no_input_reaches_become_zero() -> None:
    x = inputs(5)
    x[:, 7] = 0
    found = alone("m", torch.randn(ROWS, COLUMNS), hessian_of(x), Rounding())
    assert bool((found.dequantize()[:, 7] == 0).all())


def test_rows_of_zeros_and_of_tiny_numbers() -> None:
    weight = torch.randn(ROWS, COLUMNS)
    weight[0], weight[1] = 0, weight[1] * 1e-12
    value = alone("m", weight, hessian_of(inputs(6)), Rounding()).dequantize()
    assert bool((value[0] == 0).all()) and bool(torch.isfinite(value).all())


def test_a_sample_counts_once_however_long_it_is() -> None:
    found = Hessian(2, torch.device("cpu"))
    found.add(torch.tensor([[1.0, 0.0]]))
    found.add(torch.zeros(0, 2))  # an expert that got no token
    found.add(torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=torch.bfloat16))
    assert found.num_samples == 2
    assert found.matrix.tolist() == [[1.0, 0.0], [0.0, 2.0]]


def test_inputs_that_are_all_alike_need_more_damping_and_a_broken_matrix_is_named() -> None:
    alike = Hessian(COLUMNS, torch.device("cpu"))
    alike.add(torch.ones(5, COLUMNS))
    assert alone("m", torch.randn(ROWS, COLUMNS), alike.matrix, Rounding(damping=1e-6)).error < 1
    broken = -torch.eye(COLUMNS)
    with pytest.raises(StartupError, match=r"^the inputs of layers\.0\.m are too much alike"):
        alone("layers.0.m", torch.randn(ROWS, COLUMNS), broken, Rounding())


def test_matrices_of_the_same_inputs_are_rounded_together_as_alone() -> None:
    generator = torch.Generator().manual_seed(10)
    weights = {name: torch.randn(rows, COLUMNS, generator=generator) for name, rows in (("q", 24), ("k", 8), ("v", 16))}
    hessian = hessian_of(inputs(11))
    for name, one in rounded(weights, hessian, Rounding(group=64)).items():
        other = alone(name, weights[name], hessian, Rounding(group=64))
        assert one.codes.shape == other.codes.shape == weights[name].shape
        assert float((one.codes == other.codes).float().mean()) > 0.97
        assert one.error == pytest.approx(other.error, rel=0.05)


def test_inputs_of_bfloat16_lose_nothing_in_the_hessian() -> None:
    x = inputs(12).bfloat16()
    found = Hessian(COLUMNS, torch.device("cpu"))
    found.add(x)
    exact = 2 * x.double().t() @ x.double()
    assert float((found.matrix - exact).abs().max() / exact.abs().max()) < 1e-5
    assert torch.get_float32_matmul_precision() == "highest"
