"""Both ways to run experts without kernels of our own, against a loop written out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from model_server.layers.activation import Activation, gated
from model_server.layers.experts.experts import Experts, ExpertWeights
from model_server.layers.experts.grouped import GroupedExperts
from model_server.layers.experts.visited import VisitedExperts
from model_server.layers.linear.factory import LinearFactory
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
    return GroupedExperts(experts, len(experts), activation, torch.float32, on_input=on_input)


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


def test_an_expert_is_read_when_its_turn_comes() -> None:
    """Those of a layer never lie in memory a second time, beside their stack: one before and one after its copy do."""
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def reading() -> Iterator[ExpertWeights]:
        nonlocal most
        for _ in range(EXPERTS):
            up, down = torch.ones(2 * SIZE, HIDDEN), torch.ones(HIDDEN, SIZE)
            alive.add(up)
            most = max(most, len(alive))
            yield ExpertWeights(Plain(up), Plain(down))
            del up, down

    GroupedExperts(reading(), EXPERTS, gated("silu"), torch.float32, on_input=False)
    assert most <= 2
    assert len(alive) == 0
