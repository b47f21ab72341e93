"""oneDNN's layout, where torch has the operators for it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from model_server.layers.linear import onednn
from model_server.layers.linear.onednn import OneDnnLinear, weight_packer

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_packer_is_for_cpus() -> None:
    weight_packer.cache_clear()
    assert weight_packer(GPU, torch.float32) is None
    assert weight_packer(CPU, torch.float16) is None


@pytest.mark.parametrize("wrong", [AttributeError, RuntimeError])
def test_without_the_private_operators_nothing_is_packed(
    monkeypatch: pytest.MonkeyPatch, wrong: type[Exception]
) -> None:
    def broken(weight: torch.Tensor) -> torch.Tensor:
        raise wrong

    weight_packer.cache_clear()
    monkeypatch.setattr(onednn, "_pack", broken)
    assert weight_packer(CPU, torch.float32) is None
    weight_packer.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(300, 400), (800, 500)], ids=["one row unpacked", "packed"])
def test_products(size: tuple[int, int], dtype: torch.dtype) -> None:
    packer = weight_packer(CPU, dtype)
    if packer is None:
        pytest.skip("this torch has no such operators")
    weight, bias = torch.randn(size).to(dtype), torch.randn(size[0]).to(dtype)
    bound = 1e-5 if dtype == torch.float32 else 5e-2
    for given in (None, bias):
        linear = OneDnnLinear(weight, given, packer)
        for rows in (1, 2, 33):
            x = torch.randn(rows, size[1]).to(dtype)
            wanted = F.linear(x.double(), weight.double(), None if given is None else given.double())
            assert linear(x).dtype == dtype
            torch.testing.assert_close(linear(x).double(), wanted, rtol=bound, atol=bound * 5)
            assert linear.wide(x).dtype == torch.float32
            assert torch.equal(linear.wide(x), linear(x).float())
