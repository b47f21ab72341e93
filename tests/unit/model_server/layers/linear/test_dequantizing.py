"""Products with matrices that are decoded piece by piece, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_server.layers.linear.dequantizing import PIECE_BYTES, DequantizingLinear, SplitLinear
from model_server.quantization.forms import Form, Plain
from model_server.quantization.forms.codes import Codes, Order
from model_server.quantization.forms.float8 import Fp8

# The last piece of rows is a short one, groups and blocks end in short ones.
OUT, IN = 600, 2000
GENERATOR = torch.Generator().manual_seed(7)


def codes(bits: int, group: int, *, ordered: bool = False) -> Codes:
    num_groups = -(-IN // group)
    order = Order(torch.randperm(IN, generator=GENERATOR).int(), IN) if ordered else None
    return Codes.of(
        torch.randint(0, 2**bits, (OUT, IN), generator=GENERATOR).to(torch.uint8),
        torch.rand(OUT, num_groups, generator=GENERATOR).half(),
        torch.randint(0, 2**bits, (OUT, num_groups), generator=GENERATOR).to(torch.uint8),
        group,
        bits,
        order,
    )


def fp8(height: int, width: int) -> Fp8:
    weight = torch.randn(OUT, IN, generator=GENERATOR).to(torch.float8_e4m3fn)
    return Fp8(weight, torch.rand(-(-OUT // height), -(-IN // width), generator=GENERATOR), (height, width))


FORMS: dict[str, Form] = {
    "4 bits": codes(4, 128),
    "8 bits, one group a row": codes(8, IN),
    "4 bits, another order": codes(4, 100, ordered=True),
    "fp8 blocks": fp8(128, 128),
    "fp8 rows": fp8(1, IN),
    "fp8 scalar": fp8(OUT, IN),
}


def exact(form: Form) -> Tensor:
    """[out, in] float64, element by element from the definition of the form."""
    place = torch.arange(IN)
    if isinstance(form, Fp8):
        height, width = form.block
        return form.weight.double() * form.scales.double()[torch.arange(OUT) // height][:, place // width]
    assert isinstance(form, Codes)
    groups = place // form.group
    values = (form.unpacked().double() - form.zeros.double()[:, groups]) * form.scales.double()[:, groups]
    if form.order is None:
        return values
    found = torch.empty_like(values)
    found[:, form.order.columns.long()] = values
    return found


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("name", list(FORMS))
def test_products(name: str, dtype: torch.dtype, most: float) -> None:
    """The largest error, relative to the largest sum."""
    assert PIECE_BYTES // (4 * IN) < OUT, "one piece tests no seams"
    form = FORMS[name]
    bias = torch.randn(OUT, generator=GENERATOR).to(dtype)
    linear = DequantizingLinear(form, bias)
    for num_rows in (1, 7, 64):
        x = torch.randn(num_rows, IN, generator=GENERATOR).to(dtype)
        wanted = x.double() @ exact(form).t() + bias.double()
        for found in (linear(x), linear.wide(x)):
            assert ((found.double() - wanted).abs().max() / wanted.abs().max()).item() <= most
        assert linear(x).dtype == dtype
        assert linear.wide(x).dtype == torch.float32
        out = torch.empty(num_rows, OUT)
        assert linear.write(x, out) is out and torch.equal(out, linear.wide(x))


def test_products_side_by_side() -> None:
    forms = (FORMS["4 bits"], FORMS["fp8 blocks"], Plain(torch.randn(OUT, IN, generator=GENERATOR)))
    linear = SplitLinear([DequantizingLinear(form, None) for form in forms])
    x = torch.randn(7, IN, generator=GENERATOR)
    whole = torch.cat([exact(forms[0]), exact(forms[1]), forms[2].dequantize(torch.float64)])
    wanted = x.double() @ whole.t()
    assert ((linear(x).double() - wanted).abs().max() / wanted.abs().max()).item() <= 1e-5
