"""Blocks hand on the residual stream beside what is still to be added: the sums come out as if taken at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from model_server.layers.norm import AddNorm, LayerNorm, RmsNorm
from model_server.memory.kv_cache import KvShape
from model_server.models.decoder.blocks import Block, ParallelBlock, PostNormBlock, SequentialBlock, residual_norm

SIZE = 8


class FakeAttention:
    """Doubles what it reads; its output product takes the root of the absolute value."""

    @property
    def kv_shape(self) -> KvShape:
        return KvShape(1, 1, 1)

    def output(self, attended: Tensor) -> Tensor:
        return attended.abs().sqrt()

    def __call__(self, hidden: Tensor, step: Any) -> Tensor:
        return hidden * 2


def mlp(hidden: Tensor, step: Any) -> Tensor:
    return hidden.sin()


def norm(seed: int) -> RmsNorm:
    return RmsNorm(torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)), 1e-5)


def sequential(x: Tensor, norms: list[AddNorm | None], multiplier: float, rows: Any = slice(None)) -> Tensor:
    """The definition."""
    attention_norm, attention_post, mlp_norm, mlp_post = (n or (lambda t: t) for n in norms)
    attended = (attention_norm(x) * 2)[rows]
    x = x[rows] + attention_post(attended.abs().sqrt()) * multiplier
    return x + mlp_post(mlp(mlp_norm(x), None)) * multiplier


def total(stream: tuple[Tensor, Tensor | None]) -> Tensor:
    hidden, added = stream
    return hidden if added is None else hidden + added


def reduce(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("multiplier", [1.0, 0.5])
@pytest.mark.parametrize("which", [(0, None, 1, None), (0, 1, 2, 3), (None, 0, None, 1), (None, None, None, None)])
def test_sequential(which: tuple[int | None, ...], multiplier: float, pending: bool) -> None:
    norms: list[AddNorm | None] = [None if seed is None else norm(seed) for seed in which]
    block = SequentialBlock(FakeAttention(), mlp, reduce, norms[0], norms[1], norms[2], norms[3], multiplier)
    hidden = torch.randn(3, SIZE)
    added = torch.randn(3, SIZE) if pending else None
    before = hidden.clone()
    x = hidden if added is None else hidden + added
    rows = torch.tensor([2, 0])
    wanted, kept = sequential(x, norms, multiplier), sequential(x, norms, multiplier, rows)
    torch.testing.assert_close(total(block(hidden, None if added is None else added.clone(), None)), wanted)  # type: ignore[arg-type]
    torch.testing.assert_close(total(block(hidden, added, None, rows)), kept)  # type: ignore[arg-type]
    assert torch.equal(hidden, before)


def test_what_the_mlp_gives_is_left_to_the_next_norm() -> None:
    """A whole sum of its own costs a kernel: neither half may take one where a norm follows."""
    block = SequentialBlock(FakeAttention(), mlp, reduce, norm(0), None, norm(1), None, 1.0)
    hidden, added = block(torch.randn(3, SIZE), None, None)  # type: ignore[arg-type]
    assert added is not None
    follower = norm(2)
    wanted = follower(hidden + added)
    assert torch.equal(residual_norm(follower, hidden, added)[1], wanted)


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("own_norm", [False, True])
def test_parallel(own_norm: bool, pending: bool) -> None:
    first, second = LayerNorm(torch.randn(SIZE), None, 1e-5), norm(1) if own_norm else None
    block = ParallelBlock(FakeAttention(), mlp, reduce, first, second)
    hidden, added = torch.randn(3, SIZE), torch.randn(3, SIZE) if pending else None
    x = hidden if added is None else hidden + added
    wanted = x + (first(x) * 2).abs().sqrt() + mlp((second or first)(x), None)
    rows = torch.tensor([1])
    torch.testing.assert_close(total(block(hidden, None if added is None else added.clone(), None)), wanted)  # type: ignore[arg-type]
    torch.testing.assert_close(total(block(hidden, added, None, rows)), wanted[rows])  # type: ignore[arg-type]


@pytest.mark.parametrize("with_norms", [False, True])
def test_post_norm(with_norms: bool) -> None:
    norms = (norm(0), norm(1)) if with_norms else (None, None)
    block: Block = PostNormBlock(FakeAttention(), mlp, reduce, *norms)
    hidden, rows = torch.randn(3, SIZE), torch.tensor([1, 1])
    one, two = (n or (lambda t: t) for n in norms)
    x = one(hidden + (hidden * 2).abs().sqrt())
    wanted = two(x + mlp(x, None))
    torch.testing.assert_close(total(block(hidden, None, None)), wanted)  # type: ignore[arg-type]
    torch.testing.assert_close(total(block(hidden, None, None, rows)), wanted[rows])  # type: ignore[arg-type]


def test_join_without_a_norm() -> None:
    hidden, added = torch.randn(2, SIZE), torch.randn(2, SIZE)
    wanted = hidden + added
    stream, normed = residual_norm(None, hidden, added)
    assert stream is normed
    assert torch.equal(stream, wanted)
    assert residual_norm(None, hidden, None) == (hidden, hidden)
