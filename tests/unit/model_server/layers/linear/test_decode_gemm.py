"""How products of few rows are chosen: everything but the time that they take, which only a GPU knows."""

from __future__ import annotations

import pytest
import torch

from model_server.distributed.group import ProcessGroup
from model_server.layers.linear import decode_gemm as small_products
from model_server.layers.linear.decode_gemm import BUCKETS, SmallProduct, measure, small_product

CPU = torch.device("cpu")


class Choosing(SmallProduct):
    """Candidates without kernels: the library, and two ways that are told apart by their name."""

    __slots__ = ("ran",)

    def __init__(self) -> None:
        super().__init__((4, 3), torch.bfloat16, 132)
        self.ran: list[object] = []

    def candidates(self, bucket: int) -> list[object]:
        return [None, "one", "two"]

    def _run(self, way: object, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.ran.append(way)
        return super()._run(None, x, weight, bias)


class TwoRanks(ProcessGroup):
    """The other rank's values, one after the other."""

    size = 2

    def __init__(self, others: list[int]) -> None:
        self.others = others

    def all_reduce_min(self, value: int) -> int:
        return min(value, self.others.pop(0))


def test_a_cpu_and_float32_have_none() -> None:
    assert small_product(torch.zeros(2048, 1024)) is None
    assert small_product(torch.zeros(2048, 1024, dtype=torch.bfloat16)) is None
    measure(CPU, ProcessGroup())


def test_every_bucket_has_its_own_way() -> None:
    product = Choosing()
    for bucket, number in enumerate((2, 0, 1, 0)):
        product.choose(bucket, number)
    weight, bias = torch.randn(4, 3), torch.randn(4)
    for num_rows in (0, 1, 2, 8, 9, 16, 17, 32, 33):
        x = torch.randn(num_rows, 3)
        assert torch.equal(product(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
    # Without rows, and beyond the last bucket, nobody is asked.
    assert product.ran == ["two", None, None, "one", "one", None, None]
    assert BUCKETS == (1, 8, 16, 32)


@pytest.mark.parametrize(("times", "best"), [([1.0, 0.9, 0.8], 2), ([1.0, 0.99, 0.98], 0), ([1.0, 0.5, 0.5], 1)])
def test_ours_must_be_clearly_quicker(times: list[float], best: int) -> None:
    left = list(times)
    assert Choosing().quickest(0, lambda run: left.pop(0), CPU) == best


def test_ranks_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    product = Choosing()
    monkeypatch.setattr(small_products, "_known", {(CPU, torch.bfloat16, (4, 3)): product})
    monkeypatch.setattr(small_products, "_measured", lambda found, device: [2, 1, 0, 2])
    measure(CPU, TwoRanks([1, -1, 1, 1, 1, 2]))
    assert product._ways == ["one", "one", None, "two"]


def test_ranks_with_other_shapes_keep_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    product = Choosing()
    monkeypatch.setattr(small_products, "_known", {(CPU, torch.bfloat16, (4, 3)): product})
    group = TwoRanks([2, -2])
    measure(CPU, group)
    assert product._ways == [None] * 4
    assert group.others == []


def test_the_library_is_kept_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short:
        def __init__(self, device: torch.device) -> None:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(small_products, "_Stopwatch", Short)
    assert small_products._measured([Choosing()], CPU) == [0] * 4
