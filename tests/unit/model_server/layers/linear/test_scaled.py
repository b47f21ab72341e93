"""Products of 8-bit floats by torch's operator, which a CPU has too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model_server.layers.linear.scaled import ScaledProduct, can_scale
from model_server.quantization.forms.float8 import Fp8, quantize_inputs, quantize_rows


def matrix(kind: str) -> Fp8:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    rows = replace(quantize_rows(weight, weight.abs().amax(1)), float8_inputs=True)
    if kind == "rows":
        return rows
    if kind == "parts":  # fused matrices, each with a scale of its own
        return Fp8(weight.to(torch.float8_e4m3fn), torch.tensor([[0.3], [2.0], [0.1]]), (16, 64), float8_inputs=True)
    return Fp8(weight.to(torch.float8_e4m3fn), torch.tensor([[0.3]]), (48, 64), float8_inputs=True)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["rows", "parts", "matrix"])
def test_products_with_quantized_inputs(kind: str, dtype: torch.dtype, biased: bool) -> None:
    form = matrix(kind)
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[5] = 0.0
    x[6] *= 1e4
    bias = torch.randn(48, generator=torch.Generator().manual_seed(2)).bfloat16() if biased else None
    inputs, scales = quantize_inputs(x)
    read = inputs.double() * scales.double()
    assert (read - x.double()).abs().div(x.double().abs().amax(1, keepdim=True).clamp_min(1)).max() < 2**-4
    wanted = read @ form.dequantize(torch.float32).double().T + (0 if bias is None else bias.double())
    actual = ScaledProduct(form, bias)(x, dtype)
    assert actual.dtype == dtype
    out = torch.full_like(actual, torch.nan)
    assert ScaledProduct(form, bias)(x, dtype, out) is out and torch.equal(out, actual)
    torch.testing.assert_close(actual.double(), wanted, rtol=1e-2, atol=5e-2)


def test_where_it_serves() -> None:
    one, rows = matrix("matrix"), matrix("rows")
    half, brain = torch.float16, torch.bfloat16
    assert can_scale(one, half, (8, 9))
    assert not can_scale(one, brain, (8, 6))
    assert can_scale(rows, brain, (9, 0))
    assert can_scale(matrix("parts"), brain, (9, 0))
    assert not can_scale(rows, brain, (8, 9))
    assert not can_scale(rows, half, (9, 0))
    assert not can_scale(replace(rows, float8_inputs=False), brain, (9, 0))
    assert not can_scale(rows.rows(0, 40), brain, (9, 0))  # no multiple of 16
    assert rows.rows(0, 32).float8_inputs
    blocks = Fp8(rows.weight, torch.ones(3, 4), (16, 16), float8_inputs=True)
    assert not can_scale(blocks, brain, (9, 0))
