"""Norm, activation, linear, embedding and head against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.distributed import ProcessGroup
from model_server.errors import StartupError
from model_server.layers.activation import gated
from model_server.layers.embedding import Embedding, Head, vocab_range
from model_server.layers.linear import Linear
from model_server.layers.norm import RmsNorm


class Rank(ProcessGroup):
    """One rank whose collectives are recorded instead of carried out."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.reduced: list[Tensor] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.reduced.append(tensor)
        return tensor

    def all_gather_last(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * self.size, -1)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e4])
def test_rms_norm(scale: float) -> None:
    x, weight = torch.randn(5, 24) * scale, torch.randn(24)
    wanted = F.rms_norm(x.double(), (24,), weight.double(), 1e-6)
    torch.testing.assert_close(RmsNorm(weight, 1e-6)(x).double(), wanted, rtol=1e-5, atol=1e-6)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not RmsNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8)).any()


def test_rms_norm_per_head_in_bfloat16() -> None:
    x, weight = torch.randn(3, 2, 8, dtype=torch.bfloat16), torch.randn(2, 8, dtype=torch.bfloat16)
    result = RmsNorm(weight, 1e-6)(x)
    wanted = F.rms_norm(x.double(), (8,), None, 1e-6) * weight.double()
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), wanted, rtol=1e-2, atol=1e-2)


def test_gated_silu() -> None:
    x = torch.randn(3, 10)
    assert torch.allclose(gated("silu")(x), F.silu(x[:, :5]) * x[:, 5:])


def test_unknown_activation() -> None:
    with pytest.raises(StartupError, match="hidden_act 'tanh' is not served; served: gelu, "):
        gated("tanh")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 2, 33])
@pytest.mark.parametrize("out", [48, 2048, 5120], ids=["plain", "packed or plain", "packed"])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype: torch.dtype, num_rows: int, out: int, bias: bool) -> None:
    weight, x = torch.randn(out, 64).to(dtype), torch.randn(num_rows, 64).to(dtype)
    b = torch.randn(out).to(dtype) if bias else None
    wanted = F.linear(x.double(), weight.double(), None if b is None else b.double())
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(Linear(weight, b)(x).double(), wanted, rtol=tolerance, atol=tolerance * 5)


@pytest.mark.parametrize(("size", "wanted"), [(1, [(0, 10)]), (4, [(0, 3), (3, 6), (6, 9), (9, 10)])])
def test_vocab_range(size: int, wanted: list[tuple[int, int]]) -> None:
    assert [vocab_range(10, Rank(r, size)) for r in range(size)] == wanted


def test_vocab_range_can_be_empty() -> None:
    assert [vocab_range(5, Rank(r, 4)) for r in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


def test_embedding_shards_sum_to_the_table() -> None:
    table, ids = torch.randn(10, 4), torch.tensor([0, 9, 3, 2, 3])
    total = torch.zeros(5, 4)
    for rank in range(4):
        group = Rank(rank, 4)
        start, stop = vocab_range(10, group)
        total += Embedding(table[start:stop], start, group)(ids)
    assert torch.equal(total, table[ids])
    assert torch.equal(Embedding(table, 0, ProcessGroup())(ids), table[ids])
    assert torch.equal(ids, torch.tensor([0, 9, 3, 2, 3]))


def test_head_gathers_only_when_sharded() -> None:
    weight, hidden = torch.randn(6, 4), torch.randn(2, 4)
    group = Rank(0, 2)
    assert Head(Linear(weight), group, sharded=True)(hidden).shape == (2, 12)
    whole = Head(Linear(weight.bfloat16()), group, sharded=False)(hidden.bfloat16())
    assert whole.shape == (2, 6)
    assert whole.dtype == torch.float32
