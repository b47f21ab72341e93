"""Products as a CPU is given them, against plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from support.linears import make_linear

from model_server.cpp.library import library

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(64, 32), (100, 48), (33, 7), (1, 512), (300, 130)], ids=str)
def test_linear(size: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = torch.randn(size).to(dtype), torch.randn(size[0]).to(dtype)
    for given in (None, bias):
        linear = make_linear(weight.clone(), given)
        for rows in (1, 2, 5, 6, 7, 13, 100):
            x = torch.randn(rows, size[1]).to(dtype)
            expected = F.linear(x.double(), weight.double(), None if given is None else given.double())
            bound = BOUNDS[dtype] * float(expected.abs().max())
            assert linear(x).dtype == dtype
            torch.testing.assert_close(linear(x).double(), expected, rtol=0, atol=bound)
            assert linear.wide(x).dtype == torch.float32
            torch.testing.assert_close(linear.wide(x).double(), expected, rtol=0, atol=bound)


def test_linear_takes_rows_that_are_far_apart() -> None:
    weight, wide = torch.randn(64, 32), torch.randn(9, 80)
    torch.testing.assert_close(
        make_linear(weight)(wide[:, 8:40]), F.linear(wide[:, 8:40], weight), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_depends_on_its_row_alone(dtype: torch.dtype) -> None:
    """Bit for bit, with the C++ operators."""
    linear = make_linear(torch.randn(320, 576).to(dtype))
    x = torch.randn(40, 576).to(dtype)
    together = linear(x)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        shared = linear(x)
    finally:
        torch.set_num_threads(threads)
    alone = torch.cat([linear(row.unsqueeze(0)) for row in x])
    bound = 0.0 if library() is not None else 1.0
    torch.testing.assert_close(alone, together, rtol=0, atol=bound)
    torch.testing.assert_close(shared, together, rtol=0, atol=bound)
