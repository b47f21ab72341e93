"""8-bit floats with scales: what an element is worth, and which scales the parts of a matrix keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_server.quantization.forms.float8 import Fp8, cat, columns_of_blocks, quantize_rows, rows_of_blocks


def random_form(num_rows: int, num_columns: int, block: tuple[int, int], seed: int = 0) -> Fp8:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_rows, num_columns, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-num_rows // block[0]), -(-num_columns // block[1]), generator=generator) + 0.1
    return Fp8(weight, scales, block)


def by_element(form: Fp8) -> Tensor:
    """The definition, number by number."""
    weight, (height, width) = form.weight.float(), form.block
    values = [
        [weight[i, k] * form.scales[i // height, k // width] for k in range(weight.shape[1])]
        for i in range(weight.shape[0])
    ]
    return torch.tensor(values)


BLOCKS = [(10, 14), (1, 14), (1, 4), (4, 14), (4, 4), (3, 5), (10, 4)]


@pytest.mark.parametrize("block", BLOCKS)
def test_an_element_is_its_number_times_the_scale_of_its_block(block: tuple[int, int]) -> None:
    form = random_form(10, 14, block)
    assert torch.equal(form.dequantize(torch.float32), by_element(form))
    assert torch.equal(form.dequantize(torch.bfloat16), by_element(form).bfloat16())
    assert form.shape == (10, 14)
    assert form.nbytes == 140 + 4 * form.scales.numel()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rows", [range(10), range(4, 8), range(3, 10), [9, 2, 2], [0]])
def test_rows_in_any_order(block: tuple[int, int], rows: range | list[int]) -> None:
    form = random_form(10, 14, block)
    wanted = by_element(form)[list(rows)]
    assert torch.equal(form.permuted(torch.tensor(rows)).dequantize(torch.float32), wanted)
    if isinstance(rows, range):
        assert torch.equal(form.rows(rows.start, rows.stop).dequantize(torch.float32), wanted)


def test_scales_stay_one_for_a_block_where_the_rows_allow_it() -> None:
    scales = torch.arange(5.0).unsqueeze(1)
    for rows, kept in [
        (range(8, 16), 4),  # whole blocks
        (range(18), 4),  # a short one at the end
        (range(4, 7), 3),  # a part of one block is a block
        ([3, 2, 1, 0, 7, 6, 5, 4], 4),  # an order within blocks
        (range(2, 10), 1),
        ([0, 4, 1, 5], 1),
    ]:
        cut, height = rows_of_blocks(scales, 4, torch.tensor(rows))
        assert height == kept
        assert torch.equal(cut.repeat_interleave(height, 0)[: len(rows), 0], torch.tensor(rows) // 4 * 1.0)


def test_scales_of_columns_are_divided_where_a_block_is_cut() -> None:
    scales = torch.arange(7.0).unsqueeze(0)
    for columns, width in [((0, 896), 128), ((128, 384), 128), ((448, 896), 64), ((96, 200), 32), ((130, 140), 10)]:
        cut, kept = columns_of_blocks(scales, 128, columns)
        wanted = torch.arange(*columns) // 128 * 1.0
        assert kept == width
        assert torch.equal(cut.repeat_interleave(kept, 1)[0, : len(wanted)], wanted)


@pytest.mark.parametrize("first", BLOCKS)
@pytest.mark.parametrize("second", BLOCKS)
def test_matrices_one_after_another(first: tuple[int, int], second: tuple[int, int]) -> None:
    forms = [random_form(10, 14, first), random_form(10, 14, second, seed=1), random_form(10, 14, first, seed=2)]
    fused = cat(forms)
    assert torch.equal(fused.dequantize(torch.float32), torch.cat([by_element(form) for form in forms]))
    assert cat(forms[:1]) is forms[0]


def test_blocks_in_line_stay_blocks() -> None:
    fused = cat([random_form(8, 8, (4, 4)), random_form(4, 8, (4, 4)), random_form(6, 8, (4, 4))])
    assert fused.block == (4, 4)
    assert fused.scales.shape == (5, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_quantized_by_their_largest_magnitude(dtype: torch.dtype) -> None:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[2] = 0
    form = quantize_rows(weight, weight.float().abs().amax(1))
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    assert torch.equal(form.scales, scales)
    assert torch.equal(form.dequantize(torch.float32)[2], torch.zeros(32))
    others = [0, 1, 3, 4, 5]
    nearest = (weight.float() / scales)[others].to(torch.float8_e4m3fn).float()
    assert torch.equal(form.weight.float()[others], nearest)
    assert nearest.abs().amax(1).tolist() == [448] * 5
    half = quantize_rows(weight[:, :16], weight.float().abs().amax(1))
    assert torch.equal(half.weight.float(), form.weight[:, :16].float())
