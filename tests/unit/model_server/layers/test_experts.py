"""Both ways to run experts against a loop written out, and the routing rules that no tiny model shows alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model_server.layers.activation import Activation, clamped_swiglu, gated
from model_server.layers.experts.experts import Experts, ExpertWeights
from model_server.layers.experts.grouped import GroupedExperts
from model_server.layers.experts.visited import VisitedExperts
from model_server.layers.linear.factory import LinearFactory
from model_server.layers.routing import Router, Routing
from model_server.layers.temperature import QueryTemperature
from model_server.quantization.forms import Plain

EXPERTS, TOP_K, HIDDEN, SIZE = 6, 2, 16, 8


def expert_weights(biases: bool) -> list[ExpertWeights]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return [
        ExpertWeights(
            Plain(noise(2 * SIZE, HIDDEN)),
            Plain(noise(HIDDEN, SIZE)),
            noise(2 * SIZE) if biases else None,
            noise(HIDDEN) if biases else None,
        )
        for _ in range(EXPERTS)
    ]


def visited(experts: list[ExpertWeights], activation: Activation, *, on_input: bool) -> Experts:
    linears = LinearFactory(torch.device("cpu"), torch.float32)
    return VisitedExperts(experts, activation, linears, on_input=on_input)


def grouped(experts: list[ExpertWeights], activation: Activation, *, on_input: bool) -> Experts:
    return GroupedExperts(experts, activation, torch.float32, on_input=on_input)


def written_out(
    experts: list[ExpertWeights], hidden: Tensor, weights: Tensor, chosen: Tensor, on_input: bool
) -> Tensor:
    result = torch.zeros_like(hidden)
    for token in range(len(hidden)):
        for weight, index in zip(weights[token], chosen[token].tolist(), strict=True):
            expert = experts[index]
            read = hidden[token] * weight if on_input else hidden[token]
            up = expert.up.dequantize(read.dtype) @ read + (0 if expert.up_bias is None else expert.up_bias)
            gate, linear = up.chunk(2)
            down = expert.down.dequantize(read.dtype) @ (torch.nn.functional.silu(gate) * linear)
            down = down + (0 if expert.down_bias is None else expert.down_bias)
            result[token] += down if on_input else weight * down
    return result


@pytest.mark.parametrize("kind", [visited, grouped])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 33])
@pytest.mark.parametrize(("biases", "on_input"), [(False, False), (True, False), (False, True)])
def test_experts_equal_a_loop(kind: Callable[..., Experts], num_tokens: int, biases: bool, on_input: bool) -> None:
    experts = expert_weights(biases)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
    # Expert 0 gets no token.
    chosen = 1 + torch.rand(num_tokens, EXPERTS - 1, generator=generator).topk(TOP_K).indices
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    before = hidden.clone()
    actual = kind(experts, gated("silu"), on_input=on_input)(hidden, weights, chosen)
    torch.testing.assert_close(actual, written_out(experts, hidden, weights, chosen, on_input), rtol=1e-4, atol=1e-4)
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("kind", [visited, grouped])
def test_one_expert_read_by_its_weight(kind: Callable[..., Experts]) -> None:
    """Top 1 with weights on the input, as in Llama 4: the result is a new tensor."""
    experts = expert_weights(biases=False)
    hidden, weights, chosen = torch.randn(1, HIDDEN), torch.rand(1, 1), torch.tensor([[3]])
    actual = kind(experts, gated("silu"), on_input=True)(hidden, weights, chosen)
    torch.testing.assert_close(actual, written_out(experts, hidden, weights, chosen, True), rtol=1e-4, atol=1e-4)


def router(routing: Routing, logits: Tensor, correction: Tensor | None = None) -> tuple[list[int], list[float]]:
    """The experts of one token with these logits, in order, and their weights."""
    weights, chosen = Router(routing, torch.diag(logits), None, correction)(torch.ones(1, len(logits)))
    order = chosen[0].argsort()
    return chosen[0][order].tolist(), weights[0][order].tolist()


def test_weights_of_the_chosen_sum_to_one_and_are_scaled() -> None:
    chosen, weights = router(Routing(num_experts=4, top_k=2, norm=1.0, scaling=2.5), torch.tensor([1.0, 3.0, 2.0, 0.0]))
    assert chosen == [1, 2]
    assert sum(weights) == pytest.approx(2.5)
    assert weights[0] / weights[1] == pytest.approx(torch.tensor(1.0).exp().item())


def test_large_sigmoids_are_still_told_apart() -> None:
    """In float32 both are 1."""
    routing = Routing(num_experts=3, top_k=1, score="sigmoid")
    assert router(routing, torch.tensor([40.0, 50.0, 45.0])) == ([1], [1.0])


def test_a_correction_chooses_but_does_not_weigh() -> None:
    routing = Routing(num_experts=3, top_k=1, score="sigmoid")
    chosen, weights = router(routing, torch.tensor([0.0, 2.0, 0.0]), torch.tensor([0.0, 0.0, 1.0]))
    assert chosen == [2]
    assert weights == [0.5]


@pytest.mark.parametrize(("score", "expected"), [("max", [0, 1]), ("best_two", [2, 3])])
def test_groups(score: str, expected: list[int]) -> None:
    """The first group has the best expert, the second the best pair."""
    routing = Routing(num_experts=4, top_k=2, score="sigmoid", num_groups=2, top_groups=1, group_score=score)  # type: ignore[arg-type]
    assert router(routing, torch.tensor([2.0, -3.0, 1.5, 1.4]))[0] == expected


def test_clamped_swiglu() -> None:
    gate, up = torch.tensor([9.0, -9.0, 1.0]), torch.tensor([9.0, -9.0, 0.5])
    expected = torch.stack([g.clamp(max=7) * torch.sigmoid(1.5 * g.clamp(max=7)) * (u + 1) for g, u in
                            zip(gate, up.clamp(-7, 7), strict=True)])  # fmt: skip
    torch.testing.assert_close(clamped_swiglu(1.5, 7.0)(torch.cat((gate, up))), expected)


@pytest.mark.parametrize("jitter", [0.01, 0.5])
def test_sparse_mixer_is_that_of_transformers(jitter: float) -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    routing = Routing(num_experts=8, top_k=2, score="sparse_mixer", jitter=jitter)
    weights, chosen = Router(routing, torch.eye(8), None, None)(logits)
    expected_weights, expected = sparsemixer(logits, jitter_eps=jitter, training=False)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights)


def test_query_temperature() -> None:
    """Positions 0 to 2 are below the first interval, position 3 begins it."""
    factors = QueryTemperature(strength=0.1, interval=4)(torch.tensor([0, 2, 3, 7, 8]))
    assert factors.shape == (5, 1, 1)
    expected = [1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3), 1 + 0.1 * math.log(3)]
    assert factors.flatten().tolist() == pytest.approx(expected)
