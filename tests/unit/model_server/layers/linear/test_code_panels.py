"""Products with codes by the C++ operators, against the matrix that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from model_server.cpp.library import library
from model_server.layers.linear.code_panels import CodeLinear, can_pack
from model_server.layers.linear.dequantizing import DequantizingLinear
from model_server.layers.linear.factory import LinearFactory
from model_server.quantization.forms.codes import E2M1, Codes, Order
from model_server.quantization.forms.float8 import Fp8
from model_server.quantization.forms.offset_codes import OffsetCodes
from model_server.quantization.forms.table import TableCodes

CPU = torch.device("cpu")
# Of the largest output: activations keep 14 bits beside bfloat16 ones, and 21 beside float32 ones.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 5e-4}
pytestmark = pytest.mark.skipif(library() is None, reason="no C++ operators on this machine")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def random_codes(rows: int, columns: int, bits: int, group: int, order: Order | None = None) -> Codes:
    """Of 4-bit floats if `bits` is 0."""
    if bits == 0:
        form = random_codes(rows, columns, 4, group, order)
        return replace(form, zeros=torch.full_like(form.zeros, E2M1[0]), levels=E2M1)
    shape = rows, -(-columns // group)
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8)
    zeros = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    return Codes.of(codes, (torch.rand(shape) + 0.1).half(), zeros, group, bits, order)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("group", [16, 32, 128, 1024])
@pytest.mark.parametrize("bits", [0, 4, 5, 6, 8])
def test_a_product_is_that_with_the_decoded_matrix(bits: int, group: int, dtype: torch.dtype) -> None:
    form, bias = random_codes(100, 1024, bits, group), torch.randn(100).to(dtype)
    linear = LinearFactory(CPU, dtype).make(form, bias)
    assert isinstance(linear, CodeLinear)
    decoded = form.dequantize(torch.float32).double()
    for rows in (1, 7, 64):
        x = torch.randn(rows, 1024).to(dtype)
        expected = x.double() @ decoded.T + bias.double()
        together = linear.wide(x)
        bound = BOUNDS[dtype] * float(expected.abs().max())
        torch.testing.assert_close(together.double(), expected, rtol=0, atol=bound)
        assert torch.equal(linear(x), together.to(dtype))
        assert torch.equal(torch.cat([linear.wide(row) for row in x.split(1)]), together)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("block", [(100, 500), (1, 500), (64, 128)], ids=str)
def test_a_product_with_8_bit_floats_rounds_nothing(block: tuple[int, int], dtype: torch.dtype) -> None:
    weight = (torch.randn(100, 500) * 50).to(torch.float8_e4m3fn)
    form = Fp8(weight, torch.rand(-(-100 // block[0]), -(-500 // block[1])) + 0.1, block)
    linear = LinearFactory(CPU, dtype).make(form)
    assert isinstance(linear, CodeLinear)
    x = torch.randn(9, 500).to(dtype)
    expected = x.double() @ form.dequantize(torch.float32).double().T
    together = linear.wide(x)
    torch.testing.assert_close(together.double(), expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    assert torch.equal(linear(x), together.to(dtype))
    assert torch.equal(torch.cat([linear.wide(row) for row in x.split(1)]), together)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("group", [16, 64, 500])
def test_a_product_with_4_bit_codes_of_a_table(group: int, dtype: torch.dtype) -> None:
    """The table is of the activations' type."""
    table = torch.randn(16)
    codes, scales = torch.randint(0, 16, (100, 500), dtype=torch.uint8), torch.rand(100, -(-500 // group)) + 0.1
    linear = LinearFactory(CPU, dtype).make(TableCodes.of(codes, scales, table, group))
    assert isinstance(linear, CodeLinear)
    x = torch.randn(9, 500).to(dtype)
    exact = TableCodes.of(codes, scales, table.to(dtype).float(), group).dequantize(torch.float32)
    expected = x.double() @ exact.double().T
    together = linear.wide(x)
    torch.testing.assert_close(together.double(), expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    assert torch.equal(linear(x), together.to(dtype))
    assert torch.equal(torch.cat([linear.wide(row) for row in x.split(1)]), together)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", ["floats", "halves", "steps"])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (5, 32), (6, 16), (8, 32), (4, 512)])
def test_a_product_with_codes_that_have_offsets(bits: int, group: int, kind: str, dtype: torch.dtype) -> None:
    codes = random_codes(100, 1024, bits, group)
    codes = replace(codes, zeros=torch.zeros_like(codes.zeros), scales=numbers_of(kind, codes))
    form = OffsetCodes(codes, numbers_of(kind, codes) * 4)
    linear = LinearFactory(CPU, dtype).make(form)
    assert isinstance(linear, CodeLinear)
    x = torch.randn(9, 1024).to(dtype)
    expected = x.double() @ form.dequantize(torch.float32).double().T
    together = linear.wide(x)
    bound = BOUNDS[dtype] * float(expected.abs().max())
    torch.testing.assert_close(together.double(), expected, rtol=0, atol=bound)
    assert torch.equal(torch.cat([linear.wide(row) for row in x.split(1)]), together)


def numbers_of(kind: str, form: Codes) -> torch.Tensor:
    """Random scales [out, groups]: of 256 columns in `steps`, if that is the kind, some of them below 0 and one 0."""
    shape = form.scales.shape
    if kind != "steps":
        return (torch.rand(shape) + 0.1).half().float() + (1e-6 if kind == "floats" else 0.0)
    per = max(256 // form.group, 1)
    steps = torch.randint(-128, 128, (shape[0], shape[1] // per, per))
    steps[0] = 0
    steps[1] = -steps[1].clamp(max=0)  # 128, but no -128
    steps[1, 0, 0] = 128
    return ((torch.rand(shape[0], shape[1] // per, 1) + 0.1).half().float() / 128 * steps).flatten(1)


@pytest.mark.parametrize(
    ("bits", "group", "kind", "num_bytes"),
    [
        (8, 32, "halves", 8.5), (8, 32, "floats", 9), (5, 32, "halves", 5.5), (5, 16, "halves", 7),
        (4, 32, "halves", 4.5), (4, 32, "floats", 5), (4, 32, "steps", 4.375), (6, 16, "steps", 6.625),
    ],
)  # fmt: skip
def test_numbers_take_as_few_bits_as_hold_them(bits: int, group: int, kind: str, num_bytes: float) -> None:
    codes = random_codes(64, 1024, bits, group)
    form = replace(codes, scales=numbers_of(kind, codes), zeros=torch.full_like(codes.zeros, 2 ** (bits - 1)))
    linear = CodeLinear(form, None, torch.bfloat16)
    assert linear.panels.nbytes == 64 * 1024 * num_bytes / 8
    x = torch.randn(3, 1024).bfloat16()
    expected = x.double() @ form.dequantize(torch.float32).double().T
    bound = BOUNDS[torch.bfloat16] * float(expected.abs().max())
    torch.testing.assert_close(linear.wide(x).double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("unlike", [float("nan"), 1e30, 1e-40, 1.0001])
def test_scales_that_are_no_steps_stay_floats(unlike: float) -> None:
    codes = random_codes(32, 1024, 8, 32)
    scales = numbers_of("steps", codes)
    scales[5, 3] = unlike
    form = replace(codes, scales=scales, zeros=torch.full_like(codes.zeros, 128))
    linear = CodeLinear(form, None, torch.float32)
    assert linear.panels.nbytes == 32 * 1024 * 9 / 8
    x = torch.randn(1, 1024)
    expected = x @ form.dequantize(torch.float32).T
    torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-2, equal_nan=True)


def test_a_weight_that_is_nan_is_nan() -> None:
    form = Fp8(torch.ones(32, 64).to(torch.float8_e4m3fn), torch.ones(1, 1), (32, 64))
    form.weight[3, 5] = float("nan")
    out = CodeLinear(form, None, torch.bfloat16)(torch.ones(1, 64, dtype=torch.bfloat16))
    assert out.isnan().nonzero().tolist() == [[0, 3]]


def test_columns_in_another_order_and_twice() -> None:
    columns = torch.cat([torch.randperm(48), torch.tensor([3] * 16)]).int()
    form = random_codes(40, 64, 4, 16, Order(columns, 48))
    x = torch.randn(5, 48)
    expected = x.double() @ form.dequantize(torch.float32).double().T
    torch.testing.assert_close(CodeLinear(form, None, torch.float32)(x).double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_row_that_is_not_finite_is_nan_and_alone(dtype: torch.dtype, value: float) -> None:
    linear = CodeLinear(random_codes(64, 300, 8, 300), None, dtype)
    x = torch.randn(3, 300).to(dtype)
    expected = linear(x)
    x[1, 299] = value
    out = linear(x)
    assert out[1].isnan().all()
    assert torch.equal(out[::2], expected[::2])


def test_numbers_too_small_for_a_scale_are_zero() -> None:
    linear = CodeLinear(random_codes(32, 64, 8, 64), torch.ones(32), torch.float32)
    assert torch.equal(linear(torch.full((2, 64), 1e-38)), torch.ones(2, 32))


def test_what_the_panels_do_not_take_is_decoded() -> None:
    form = random_codes(32, 60, 8, 12)  # of groups that end between inputs of a step
    assert not can_pack(form)
    assert isinstance(LinearFactory(CPU, torch.float32).make(form), DequantizingLinear)
    assert isinstance(LinearFactory(CPU, torch.float16).make(random_codes(32, 64, 8, 64)), DequantizingLinear)


def test_other_inputs_are_refused() -> None:
    linear = CodeLinear(random_codes(32, 64, 8, 64), None, torch.float32)
    with pytest.raises(RuntimeError, match="a product of"):
        linear(torch.zeros(2, 63))
    with pytest.raises(RuntimeError, match="a product of"):
        linear(torch.zeros(2, 64, dtype=torch.bfloat16))
