"""The routing rules that no tiny model shows alone."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from model_server.layers.routing import Routing, choose


def chosen_of(routing: Routing, logits: Tensor, correction: Tensor | None = None) -> tuple[list[int], list[float]]:
    """The experts of one token with these logits, in order, and their weights."""
    weights, chosen = choose(logits[None], routing, correction)
    order = chosen[0].argsort()
    return chosen[0][order].tolist(), weights[0][order].tolist()


def test_weights_of_the_chosen_sum_to_one_and_are_scaled() -> None:
    chosen, weights = chosen_of(
        Routing(num_experts=4, top_k=2, norm=1.0, scaling=2.5), torch.tensor([1.0, 3.0, 2.0, 0.0])
    )
    assert chosen == [1, 2]
    assert sum(weights) == pytest.approx(2.5)
    assert weights[0] / weights[1] == pytest.approx(torch.tensor(1.0).exp().item())


def test_large_sigmoids_are_still_told_apart() -> None:
    """In float32 both are 1."""
    routing = Routing(num_experts=3, top_k=1, score="sigmoid")
    assert chosen_of(routing, torch.tensor([40.0, 50.0, 45.0])) == ([1], [1.0])


@pytest.mark.parametrize("num_experts", [3, 16, 60, 64])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sparse_mixer"])
def test_a_tokens_bits_do_not_depend_on_the_others(score: Literal["softmax", "sigmoid"], num_experts: int) -> None:
    routing = Routing(num_experts=num_experts, top_k=2, score=score, norm=1.0)
    logits = torch.randn(200, num_experts, generator=torch.Generator().manual_seed(0)) * 3
    weights, chosen = choose(logits, routing, None)
    for count in (1, 3, 7):
        parts = [choose(part, routing, None) for part in logits.split(count)]
        assert torch.equal(torch.cat([part for part, _ in parts]), weights)
        assert torch.equal(torch.cat([part for _, part in parts]), chosen)


def test_a_correction_chooses_but_does_not_weigh() -> None:
    routing = Routing(num_experts=3, top_k=1, score="sigmoid")
    chosen, weights = chosen_of(routing, torch.tensor([0.0, 2.0, 0.0]), torch.tensor([0.0, 0.0, 1.0]))
    assert chosen == [2]
    assert weights == [0.5]


@pytest.mark.parametrize(("score", "expected"), [("max", [0, 1]), ("best_two", [2, 3])])
def test_groups(score: str, expected: list[int]) -> None:
    """The first group has the best expert, the second the best pair."""
    routing = Routing(num_experts=4, top_k=2, score="sigmoid", num_groups=2, top_groups=1, group_score=score)  # type: ignore[arg-type]
    assert chosen_of(routing, torch.tensor([2.0, -3.0, 1.5, 1.4]))[0] == expected


@pytest.mark.parametrize("jitter", [0.01, 0.5])
def test_sparse_mixer_is_that_of_transformers(jitter: float) -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    routing = Routing(num_experts=8, top_k=2, score="sparse_mixer", jitter=jitter)
    weights, chosen = choose(logits, routing, None)
    expected_weights, expected = sparsemixer(logits, jitter_eps=jitter, training=False)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights)
