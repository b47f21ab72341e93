"""How decode GEMMs are chosen: everything but the time that they take, which only a GPU knows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from model_server.distributed.group import ProcessGroup
from model_server.layers.linear import decode_gemm
from model_server.layers.linear.decode_gemm import BUCKETS, DecodeGemm, DecodeGemmLinear, measure

CPU = torch.device("cpu")


class Candidate:
    """The library's product under another name; remembers how often it ran."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.dtypes: list[torch.dtype | None] = []

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        self.rows.append(len(x))
        self.dtypes.append(dtype)
        return linear(x, weight, bias) if out is None else out.copy_(linear(x, weight, bias))


def gemm_of(*candidates: Candidate) -> DecodeGemm:
    """A product that has the library's and these for every bucket."""
    return DecodeGemm((4, 3), torch.bfloat16, [candidates] * len(BUCKETS))


def chosen(gemm: DecodeGemm) -> list[int]:
    """The number of each bucket's candidate."""
    return [gemm.candidates[place].index(gemm._by_rows[most]) for place, most in enumerate(BUCKETS)]


class TwoRanks(ProcessGroup):
    """The other rank's values, one after the other."""

    size = 2

    def __init__(self, others: list[int]) -> None:
        self.others = others

    def all_reduce_min(self, value: int) -> int:
        return min(value, self.others.pop(0))


def test_every_bucket_has_its_own_product() -> None:
    one, two = Candidate(), Candidate()
    gemm = gemm_of(one, two)
    for bucket, number in enumerate((2, 0, 1, 0)):
        gemm.choose(bucket, number)
    weight, bias = torch.randn(4, 3), torch.randn(4)
    for num_rows in (0, 1, 2, 8, 9, 16, 17, 32, 33):
        x = torch.randn(num_rows, 3)
        assert torch.equal(DecodeGemmLinear(weight, bias, gemm)(x), linear(x, weight, bias))
    # Without rows, and beyond the last bucket, the library multiplies.
    assert (two.rows, one.rows) == ([1], [9, 16])
    assert BUCKETS == (1, 8, 16, 32)


@pytest.mark.parametrize(("times", "best"), [([1.0, 0.9, 0.8], 2), ([1.0, 0.99, 0.98], 0), ([1.0, 0.5, 0.5], 1)])
def test_ours_must_be_clearly_faster(times: list[float], best: int) -> None:
    left = list(times)
    assert gemm_of(Candidate(), Candidate()).fastest(0, lambda run: left.pop(0), CPU) == best


def test_logits_are_written_in_float32_by_the_same_products() -> None:
    one = Candidate()
    gemm = gemm_of(one)
    gemm.choose(0, 1)
    made = DecodeGemmLinear(torch.randn(4, 3).bfloat16(), None, gemm)
    for num_rows in (1, 2, 33):
        assert made.wide(torch.randn(num_rows, 3).bfloat16()).shape == (num_rows, 4)
    assert (one.rows, one.dtypes) == ([1], [torch.float32])
    # Both forms are compiled when they are measured.
    one.dtypes.clear()
    gemm.fastest(0, lambda run: (run(), 1.0)[1], CPU)
    assert set(one.dtypes) == {None, torch.float32}


def test_ranks_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = gemm_of(Candidate(), Candidate())
    monkeypatch.setattr(decode_gemm, "_measured", lambda found, device: [2, 1, 0, 2])
    measure([gemm], CPU, TwoRanks([1, -1, 1, 1, 1, 2]))
    assert chosen(gemm) == [1, 1, 0, 2]


def test_ranks_with_other_shapes_keep_the_library() -> None:
    gemm = gemm_of(Candidate(), Candidate())
    group = TwoRanks([2, -2])
    measure([gemm], CPU, group)
    assert chosen(gemm) == [0] * 4
    assert group.others == []


def test_the_library_is_kept_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short:
        def __init__(self, device: torch.device) -> None:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(decode_gemm, "Stopwatch", Short)
    assert decode_gemm._measured([gemm_of(Candidate())], CPU) == [0] * 4
