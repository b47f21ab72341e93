"""torch's own product, and where it writes float32 itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from model_server.layers.linear import linear
from model_server.layers.linear.linear import TorchLinear, torch_product


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("writes", [True, False])
def test_a_gpu_writes_float32_once(writes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def mm(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        calls.append(tuple(weight.shape))
        product = (x.double() @ weight.double()).to(out_dtype)
        return product if out is None else out.copy_(product)

    calls: list[Any] = []
    monkeypatch.setattr(linear, "_WRITES_FLOAT32", writes)
    monkeypatch.setattr(torch, "mm", mm)
    x, weight, bias = torch.randn(2, 3).bfloat16(), torch.randn(4, 3).bfloat16(), torch.randn(4).bfloat16()
    for given, added, wanted in ((x, None, 0), (x.as_subclass(OnGpu), None, 1), (x.as_subclass(OnGpu), bias, 0)):
        calls.clear()
        made = TorchLinear(weight, added).wide(given)
        assert made.dtype == torch.float32
        torch.testing.assert_close(
            made.as_subclass(Tensor),
            torch.nn.functional.linear(x.float(), weight.float(), None if added is None else added.float()),
            rtol=2e-2,
            atol=2e-2,
        )
        out = torch.full((2, 4), torch.nan)
        TorchLinear(weight, added).write(given, out)
        assert torch.equal(out, made.as_subclass(Tensor))
        assert calls == [(3, 4)] * (2 * wanted if writes else 0)


@pytest.mark.parametrize("biased", [False, True])
def test_a_product_of_float32_is_written_into_memory_of_the_caller(biased: bool) -> None:
    x, weight, bias = torch.randn(2, 3), torch.randn(4, 3), torch.randn(4) if biased else None
    out = torch.full((3, 4), torch.nan)[:2]
    assert torch_product(x, weight, bias, out.dtype, out) is out
    assert torch.equal(out, torch_product(x, weight, bias))


def test_the_overload_is_called_as_torch_declares_it() -> None:
    assert "dtype_out" in torch.ops.aten.mm.overloads()
    assert (
        str(torch.ops.aten.mm.dtype._schema)
        == "aten::mm.dtype(Tensor self, Tensor mat2, ScalarType out_dtype) -> Tensor"
    )
    assert torch_product(torch.ones(1, 2), torch.ones(3, 2), None, torch.float32).tolist() == [[2.0] * 3]
