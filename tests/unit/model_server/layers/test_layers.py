"""Norm, activation, linear, embedding and head against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support.linears import make_linear
from torch import Tensor

from model_server.adapters.rows import CurrentRows
from model_server.distributed.group import ProcessGroup
from model_server.errors import StartupError
from model_server.layers.activation import ACTIVATIONS, activation, clamped_swiglu, gated
from model_server.layers.embedding import Embedding, Head, InputEmbedding, vocab_range
from model_server.layers.linear.dequantizing import DequantizingLinear, SplitLinear
from model_server.layers.linear.linear import Linear, TorchLinear
from model_server.layers.norm import LayerNorm, RmsNorm, WideRmsNorm
from model_server.layers.temperature import QueryTemperature
from model_server.models.adapters.linear import AdaptedLinear
from model_server.models.adapters.slotted import SlottedLinear
from model_server.quantization.forms import Plain


class Rank(ProcessGroup):
    """One rank whose collectives are recorded instead of carried out."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.reduced: list[Tensor] = []
        self.gathered: list[torch.dtype] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.reduced.append(tensor)
        return tensor

    def all_gather_last(self, tensor: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        self.gathered.append(tensor.dtype)
        found = torch.cat([tensor] * self.size, -1)
        return found.to(dtype) if out is None else out.copy_(found)


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


def test_layer_norm() -> None:
    x, weight, bias = torch.randn(5, 24), torch.randn(24), torch.randn(24)
    for w, b in ((weight, bias), (weight, None), (None, None)):
        assert torch.equal(LayerNorm(w, b, 1e-5)(x), F.layer_norm(x, (24,), w, b, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_per_head(dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((3, 2, 8), (2, 8), (2, 8)))
    result = LayerNorm(weight, bias, 1e-5)(x)
    wanted = F.layer_norm(x.double(), (8,), None, None, 1e-5) * weight.double() + bias.double()
    assert result.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=tolerance)


class Summing(ProcessGroup):
    """One of several ranks: adds what the others would send."""

    def __init__(self, size: int, others: Tensor) -> None:
        self.size, self._others = size, others

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor + self._others


@pytest.mark.parametrize("kv_heads", [2, 1], ids=["divided", "copied"])
def test_wide_rms_norm_spans_all_ranks(kv_heads: int) -> None:
    """Four query heads and one or two key heads on two ranks."""
    query, key = torch.randn(3, 4, 8), torch.randn(3, kv_heads, 8)
    query_weight, key_weight = torch.randn(4, 8), torch.randn(kv_heads, 8)
    wanted_query, wanted_key = (
        F.rms_norm(x.flatten(1), (x[0].numel(),), weight.flatten(), 1e-6).view(x.shape)
        for x, weight in ((query, query_weight), (key, key_weight))
    )
    other_key = key[:, 1:] if kv_heads == 2 else key
    others = torch.stack([t.square().sum((1, 2)) for t in (query[:, 2:], other_key)], 1)
    norm = WideRmsNorm(torch.cat((query_weight[:2], key_weight[:1])), 2, 1e-6, Summing(2, others))
    result = norm(torch.cat((query[:, :2], key[:, :1]), 1))
    torch.testing.assert_close(result[:, :2], wanted_query[:, :2])
    torch.testing.assert_close(result[:, 2:], wanted_key[:, :1])


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_are_transformers(name: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.randn(100) * 3
    before = x.clone()
    torch.testing.assert_close(activation(name)(x), ACT2FN[name](x), rtol=1e-5, atol=1e-6)
    assert torch.equal(x, before)


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
    torch.testing.assert_close(make_linear(weight, b)(x).double(), wanted, rtol=tolerance, atol=tolerance * 5)


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
    assert Head(make_linear(weight), group, sharded=True)(hidden).shape == (2, 12)
    whole = Head(make_linear(weight.bfloat16()), group, sharded=False)(hidden.bfloat16())
    assert whole.shape == (2, 6)
    assert whole.dtype == torch.float32


def test_a_head_that_gathers_what_is_rounded() -> None:
    weight, hidden = torch.randn(6, 4).bfloat16(), torch.randn(2, 4).bfloat16()
    group = Rank(0, 2)
    logits = Head(make_linear(weight), group, sharded=True, gathers_rounded=True)(hidden)
    assert group.gathered == [torch.bfloat16] and logits.dtype == torch.float32
    assert torch.equal(logits[:, :6], make_linear(weight)(hidden).float())


@pytest.mark.parametrize("kind", ["plain", "quantized", "gathered", "gathered as rounded", "adapted", "adapted slots"])
def test_a_head_writes_where_logits_are_wanted(kind: str) -> None:
    weight, hidden = torch.randn(6, 4), torch.randn(2, 4)
    group, gathers = Rank(0, 2), kind.startswith("gathered")
    linear: Linear = TorchLinear(weight, None)
    if kind == "quantized":
        linear = DequantizingLinear(Plain(weight), None)
    elif kind == "adapted":
        linear = AdaptedLinear(linear, CurrentRows(), 1, weight.device, weight.dtype)
    elif kind == "adapted slots":
        linear = SlottedLinear(linear, CurrentRows(), None)
    head = Head(linear, group, sharded=gathers, gathers_rounded="rounded" in kind, multiplier=0.5, softcap=2.0)
    expected = head(hidden)
    out = torch.full_like(expected, torch.nan)
    assert head(hidden, out) is out
    assert torch.equal(out, expected)


def test_a_head_that_cannot_write_there_gives_memory_of_its_own() -> None:
    weight, hidden = torch.randn(6, 4), torch.randn(2, 4)
    head = Head(SplitLinear([TorchLinear(weight, None)]), ProcessGroup(), sharded=False)
    out = torch.full((2, 6), torch.nan)
    assert torch.equal(head(hidden, out), head(hidden)) and out.isnan().all()


def test_head_multiplies_then_bends() -> None:
    weight, bias, hidden = torch.randn(6, 4), torch.randn(6), torch.randn(2, 4)
    head = Head(make_linear(weight, bias), ProcessGroup(), sharded=False, multiplier=0.5, softcap=2.0)
    torch.testing.assert_close(head(hidden), 2 * torch.tanh((hidden @ weight.T + bias) * 0.5 / 2))


def test_embedding() -> None:
    table, positions, widening = torch.randn(10, 2), torch.randn(9, 4), torch.randn(4, 2)
    ids, at = torch.tensor([3, 0, 3]), torch.tensor([0, 1, 6])
    norm = RmsNorm(torch.randn(4), 1e-6)
    embedding = InputEmbedding(
        Embedding(table, 0, ProcessGroup()), multiplier=torch.tensor(3.0), projection=make_linear(widening),
        position_table=positions, position_offset=2, norm=norm,
    )  # fmt: skip
    wanted = norm(3 * table[ids] @ widening.T + positions[at + 2])
    torch.testing.assert_close(embedding(ids, at), wanted)
    assert torch.equal(InputEmbedding(Embedding(table, 0, ProcessGroup()))(ids, at), table[ids])


def test_clamped_swiglu() -> None:
    gate, up = torch.tensor([9.0, -9.0, 1.0]), torch.tensor([9.0, -9.0, 0.5])
    expected = torch.stack([g.clamp(max=7) * torch.sigmoid(1.5 * g.clamp(max=7)) * (u + 1) for g, u in
                            zip(gate, up.clamp(-7, 7), strict=True)])  # fmt: skip
    torch.testing.assert_close(clamped_swiglu(1.5, 7.0)(torch.cat((gate, up))), expected)


def test_query_temperature() -> None:
    """Positions 0 to 2 are below the first interval, position 3 begins it."""
    factors = QueryTemperature(strength=0.1, interval=4)(torch.tensor([0, 2, 3, 7, 8]))
    assert factors.shape == (5, 1, 1)
    expected = [1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3), 1 + 0.1 * math.log(3)]
    assert factors.flatten().tolist() == pytest.approx(expected)
