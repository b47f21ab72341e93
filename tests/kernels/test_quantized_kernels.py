"""Products with quantized matrices in Triton's interpreter against the decoded matrix in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.triton_interpreter import mend

from model_server.kernels import quantized
from model_server.kernels.quantized import TILES, TileConfig, multiply, tiles_for
from model_server.layers.linear.scaled import ScaledProduct
from model_server.layers.linear.triton import TritonQuantizedLinear, can_decode, decoding_linear, kernel_matrix
from model_server.quantization.forms import Plain
from model_server.quantization.forms.codes import E2M1, Codes, Order
from model_server.quantization.forms.float8 import Fp8
from model_server.quantization.forms.table import FP4, NF4, TableCodes

mend()

# out, in: multiples of nothing; in even for 4 bits.
SHAPES = ((33, 130), (70, 94), (5, 16))


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes_of(
    out: int, columns: int, bits: int, group: int, device: torch.device, scales: torch.dtype = torch.float16
) -> Codes:
    generator = torch.Generator().manual_seed(out + group)
    groups = -(-columns // group)
    codes = torch.randint(0, 2**bits, (out, columns), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 2**bits, (out, groups), generator=generator, dtype=torch.uint8)
    size = torch.rand(out, groups, generator=generator).add(0.1).div(2**bits * columns**0.5)
    return Codes.of(codes.to(device), size.to(device, scales), zeros.to(device), group, bits)


def float4_of(out: int, columns: int, group: int, device: torch.device) -> Codes:
    form = codes_of(out, columns, 4, group, device, torch.float32)
    return replace(form, zeros=torch.full_like(form.zeros, E2M1[0]), levels=E2M1)


def nvfp4_of(out: int, columns: int, device: torch.device) -> Codes:
    """As the format's reader makes it: e4m3 floats divided by a number for each row."""
    form = float4_of(out, columns, 16, device)
    numbers = form.scales.cpu().mul(1000 * columns**0.5).to(torch.float8_e4m3fn).float()
    numbers[0, 0] = 2**-9
    divisors = torch.rand(out, 1, generator=torch.Generator().manual_seed(3)).add(1).mul(200 * columns**0.5)
    return replace(form, scales=(numbers / divisors).to(device) / 2, factors=(1 / divisors[:, 0]).to(device) / 2)


def mxfp4_of(out: int, columns: int, device: torch.device) -> Codes:
    form = float4_of(out, columns, 32, device)
    exponents = torch.randint(-8, 3, form.scales.shape, generator=torch.Generator().manual_seed(3))
    exponents[0, :2] = torch.tensor([-128, -127])  # of half the scales
    return replace(form, scales=torch.ldexp(torch.ones(form.scales.shape), exponents).to(device))


def float8_of(out: int, columns: int, block: tuple[int, int], device: torch.device) -> Fp8:
    weight = noise(out, columns, seed=out).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    weight[0, :8] = torch.tensor([0, 2**-9, -(2**-9), 448, -448, 7 * 2**-9, 2**-6, -0.0]).to(torch.float8_e4m3fn)
    height, width = block
    scales = torch.rand(-(-out // height), -(-columns // width), generator=torch.Generator().manual_seed(1))
    return Fp8(weight.to(device), scales.add(0.1).div(100 * columns**0.5).to(device), block)


def table_of(out: int, columns: int, group: int, device: torch.device, table: tuple[float, ...] = NF4) -> TableCodes:
    form = codes_of(out, columns, 4, group, device, torch.float32)
    return TableCodes(form.codes, 8 * form.scales, torch.tensor(table, device=device), group, columns)


def check(
    form: Codes | TableCodes | Fp8, num_rows: int, dtype: torch.dtype, device: torch.device, *, biased: bool = False
) -> None:
    x = noise(num_rows, form.shape[1], seed=num_rows).to(device, dtype)
    bias = noise(form.shape[0], seed=9).to(device, dtype) if biased else None
    linear = TritonQuantizedLinear(form, bias, dtype)
    wanted = x.double() @ form.dequantize(torch.float32).double().T + (0 if bias is None else bias.double())
    for actual, expected in ((linear(x), dtype), (linear.wide(x), torch.float32)):
        assert actual.shape == wanted.shape
        assert actual.dtype == expected
        assert (actual.double() - wanted).norm() / wanted.norm() < 1e-2


@pytest.mark.parametrize("num_rows", [1, 7, 33, 64])
@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, 32), (4, 1000), (8, 48), (8, 1000)])
@pytest.mark.parametrize("shape", SHAPES)
def test_codes(device: torch.device, shape: tuple[int, int], bits: int, group: int, num_rows: int) -> None:
    out, columns = shape
    form = codes_of(out, columns, bits, min(group, columns), device)
    check(form, num_rows, torch.bfloat16, device, biased=group == 32)


@pytest.mark.parametrize("num_rows", [1, 7, 33, 64])
@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_float4(device: torch.device, shape: tuple[int, int], group: int, num_rows: int) -> None:
    check(float4_of(*shape, group, device), num_rows, torch.bfloat16, device, biased=group == 32)


@pytest.mark.parametrize("num_rows", [1, 7, 33, 64])
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_scales_of_8_bits(device: torch.device, shape: tuple[int, int], kind: str, num_rows: int) -> None:
    form = (nvfp4_of if kind == "nvfp4" else mxfp4_of)(*shape, device)
    matrix = kernel_matrix(form)
    assert matrix.kind == kind
    assert matrix.scales.nbytes == matrix.num_groups * -(-shape[0] // 4) * 4, "a byte each"
    assert kernel_matrix(form, small_scales=False).kind == "float4"
    check(form, num_rows, torch.bfloat16, device, biased=num_rows == 7)
    check(form, num_rows, torch.float16, device)


@pytest.mark.parametrize("make", [nvfp4_of, mxfp4_of])
def test_matrices_with_scales_of_8_bits_are_exact(device: torch.device, make: Callable[..., Codes]) -> None:
    """Where they are read in bfloat16, but for the last bit of a number for each row."""
    form = make(16, 64, device)
    x = torch.eye(64, device=device, dtype=torch.bfloat16)
    actual = multiply(x, kernel_matrix(form), None, torch.float32, 1)
    # The interpreter has no numbers below the smallest normal one.
    torch.testing.assert_close(actual.T, form.dequantize(torch.float32), rtol=5e-7, atol=1.2e-38)


def test_scales_that_do_not_fit_8_bits(device: torch.device) -> None:
    form = nvfp4_of(16, 64, device)
    form.scales[3, 2] *= 1.01
    assert kernel_matrix(form).kind == "float4"
    assert kernel_matrix(replace(form, factors=None)).kind == "float4"
    assert kernel_matrix(nvfp4_of(16, 16, device)).kind == "float4", "one scale a row"


def test_every_4_bit_float_is_exact(device: torch.device) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 1)
    ones = torch.ones(16, 1, device=device)
    form = Codes.of(codes.to(device), ones / 2, torch.full_like(ones, 12, dtype=torch.uint8), 16, 4)
    x = torch.eye(16, device=device, dtype=torch.bfloat16)
    actual = multiply(x, kernel_matrix(replace(form, levels=E2M1)), None, torch.float32, 1)
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert actual[:, 0].tolist() == [*numbers, *(-number for number in numbers)]


@pytest.mark.parametrize("num_rows", [1, 7, 33, 64])
@pytest.mark.parametrize("group", [16, 64, 1000])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_table(device: torch.device, shape: tuple[int, int], group: int, num_rows: int) -> None:
    form = table_of(*shape, min(group, shape[1]), device, NF4 if group == 64 else FP4)
    check(form, num_rows, torch.bfloat16, device, biased=group == 16)


@pytest.mark.parametrize("table", [NF4, FP4], ids=["nf4", "fp4"])
def test_every_number_of_a_table_is_rounded_once(device: torch.device, table: tuple[float, ...]) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 1).to(device)
    scales = torch.rand(16, 2, generator=torch.Generator().manual_seed(1)).to(device)
    form = TableCodes.of(codes, scales, torch.tensor(table, device=device), 8)
    x = torch.eye(16, device=device, dtype=torch.float16)
    actual = multiply(x, kernel_matrix(form), None, torch.float32, 1)
    assert torch.equal(actual.T, form.dequantize(torch.float16).float())


@pytest.mark.parametrize("num_rows", [1, 7, 33, 64])
@pytest.mark.parametrize("block", [(1000, 1000), (1, 1000), (16, 32), (1, 24)], ids=["matrix", "row", "block", "cut"])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_float8(device: torch.device, shape: tuple[int, int], block: tuple[int, int], num_rows: int) -> None:
    form = float8_of(*shape, (min(block[0], shape[0]), min(block[1], shape[1])), device)
    check(form, num_rows, torch.bfloat16, device, biased=block[0] == 1)


@pytest.mark.parametrize("num_rows", [3, 40])
def test_float16(device: torch.device, num_rows: int) -> None:
    check(codes_of(48, 256, 4, 128, device), num_rows, torch.float16, device)
    check(codes_of(48, 256, 8, 64, device, torch.bfloat16), num_rows, torch.float16, device, biased=True)
    check(table_of(48, 256, 64, device), num_rows, torch.float16, device)
    check(float8_of(48, 256, (1, 256), device), num_rows, torch.float16, device)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_order_of_columns(device: torch.device, num_rows: int) -> None:
    """An input that stands twice, and inputs in another order."""
    form = codes_of(20, 96, 4, 32, device)
    columns = torch.randperm(90, generator=torch.Generator().manual_seed(0)).int()
    columns = torch.cat([columns, columns[:6]]).to(device)
    check(replace(form, order=Order(columns, 90)), num_rows, torch.bfloat16, device)


def test_every_8_bit_float_by_its_bits(device: torch.device) -> None:
    """What devices without an instruction for them compute is exact."""
    bits = torch.arange(256, dtype=torch.uint8)
    bits[127], bits[255] = 0, 128  # not a number
    form = Fp8(bits.view(torch.float8_e4m3fn).view(16, 16).to(device), torch.ones(1, 1, device=device), (16, 16))
    matrix = kernel_matrix(form)
    by_bits = replace(matrix, kind="float8_bits", numbers=form.weight.view(torch.uint8))
    x = torch.eye(16, device=device, dtype=torch.bfloat16)
    actual = multiply(x, by_bits, None, torch.float32, 1)
    assert torch.equal(actual.T, form.dequantize(torch.float32))


@pytest.mark.parametrize("processors", [1, 64])
@pytest.mark.parametrize("tiles", [*TILES[:3], TileConfig(16, 16, 32, 4, 2)], ids=lambda tiles: f"{tiles.rows}")
def test_sums_in_parts(device: torch.device, tiles: TileConfig, processors: int) -> None:
    """All tiles, split or whole; equal inputs give equal bits, whatever the rows beside them."""
    form = codes_of(40, 1600, 4, 64, device)
    x = noise(9, 1600, seed=3).to(device, torch.bfloat16)
    bias = noise(40, seed=4).to(device, torch.bfloat16)
    actual = multiply(x, kernel_matrix(form), bias, torch.bfloat16, processors, tiles)
    wanted = x.double() @ form.dequantize(torch.float32).double().T + bias.double()
    assert (actual.double() - wanted).norm() / wanted.norm() < 1e-2
    others = x.clone()
    others[1:] = 3.0
    assert torch.equal(multiply(others, kernel_matrix(form), bias, torch.bfloat16, processors, tiles)[0], actual[0])


def test_tiles_by_rows() -> None:
    assert [tiles_for(rows).rows for rows in (1, 16, 17, 32, 33, 64, 65, 5000)] == [16, 16, 32, 32, 64, 64, 128, 128]
    assert quantized.MOST_SPLIT_ROWS in {tiles.rows for tiles in TILES}


def test_no_rows(device: torch.device) -> None:
    linear = TritonQuantizedLinear(codes_of(8, 16, 4, 16, device), None, torch.bfloat16)
    empty = torch.empty(0, 16, dtype=torch.bfloat16, device=device)
    assert linear(empty).shape == (0, 8)
    assert linear.wide(empty).dtype == torch.float32


def test_what_is_left_to_others(device: torch.device) -> None:
    assert can_decode(codes_of(8, 40, 4, 40, device))  # one group a row, of any size
    assert can_decode(codes_of(8, 80, 8, 40, device))
    assert not can_decode(codes_of(8, 60, 8, 20, device))
    assert can_decode(table_of(8, 16, 8, device))
    odd = torch.zeros(8, 15, dtype=torch.uint8, device=device)
    assert not can_decode(TableCodes.of(odd, torch.ones(8, 1, device=device), torch.ones(16, device=device), 15))
    assert decoding_linear(float8_of(8, 60, (4, 12), device), None, torch.bfloat16) is None
    assert not can_decode(Plain(torch.zeros(8, 16, device=device)))


def test_many_rows_of_8_bit_activations(device: torch.device) -> None:
    """More rows than split the sum go to torch's operator, where a checkpoint was made for it; others keep 16 bits."""
    form = replace(float8_of(32, 64, (32, 64), device), float8_inputs=True)
    linear = TritonQuantizedLinear(form, None, torch.bfloat16)
    x = noise(33, 64, seed=0).to(device, torch.bfloat16)
    few = linear(x[:32])
    if device.type == "cpu":
        assert linear._many_rows is None
        linear._many_rows = ScaledProduct(form, None)
    if linear._many_rows is not None:
        assert torch.equal(linear(x), linear._many_rows(x, torch.bfloat16))
    for rows in (x, x[:32]):
        wide = torch.empty(len(rows), 32, device=device)
        assert linear.write(rows, wide) is wide and torch.equal(wide, linear.wide(rows))
    assert torch.equal(linear(x[:32]), few)
