"""Gated delta nets in C++: the torch ones, to the bit the same however prompts are cut and whatever rows are beside."""

from __future__ import annotations

import math
import random

import pytest
import torch
from support.recurrent_scene import CPU, Scene, random_steps
from torch import Tensor

from model_server.cpp.library import usable
from model_server.recurrence.choice import delta_net
from model_server.recurrence.cpp import MOST_KEY_DIM, CppDeltaNet
from model_server.recurrence.delta_net import DeltaWeights, TorchDeltaNet
from model_server.runner.runner import RequestState

needs_operators = pytest.mark.skipif(not usable(CPU, torch.float32), reason="no C++ operators")


def make_weights(chance: random.Random, generator: torch.Generator) -> DeltaWeights:
    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    key_heads, repeats, width = chance.choice([1, 2, 3]), chance.choice([1, 2]), chance.choice([2, 4])
    key_dim, value_dim = chance.choice([8, 17, 32, 64]), chance.choice([8, 24, 32, 40])
    by_key = chance.random() < 0.5
    repeats = 1 if by_key else repeats
    heads = key_heads * repeats
    decays = key_heads * key_dim if by_key else heads
    return DeltaWeights(
        key_heads=key_heads, repeats=repeats, key_dim=key_dim, value_dim=value_dim,
        convolution=noise(width, 2 * key_heads * key_dim + heads * value_dim), rate=-noise(decays).exp().mul_(0.2),
        bias=noise(decays), norm=noise(value_dim), eps=1e-6,
        gating="sigmoid" if chance.random() < 0.5 else "silu", most_strength=chance.choice([1.0, 2.0]),
    )  # fmt: skip


@needs_operators
@pytest.mark.parametrize("seed", range(12))
def test_any_cut_gives_the_bits_of_the_whole_and_what_torch_gives(seed: int) -> None:
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    weights, dtype = make_weights(chance, generator), chance.choice([torch.float32, torch.bfloat16])
    lengths = [chance.randint(1, 150) for _ in range(chance.randint(1, 4))]
    rows = [torch.randn(length, weights.inputs, generator=generator).to(dtype) for length in lengths]
    native = CppDeltaNet(weights)
    whole, cut = Scene(native, weights, rows), Scene(native, weights, rows)
    reference = Scene(TorchDeltaNet(weights), weights, rows)
    found, expected = whole.run([lengths]), reference.run(random_steps(chance, lengths))
    for part, other, exact in zip(found, cut.run(random_steps(chance, lengths)), expected, strict=True):
        assert torch.equal(part, other)
        error = float((part.float() - exact.float()).abs().max() / exact.float().abs().max())
        assert error < (1e-5 if dtype is torch.float32 else 1e-2)
    assert all(torch.equal(a, b) for a, b in zip(whole.kept(), cut.kept(), strict=True))
    (inputs, state), (exact_inputs, exact_state) = whole.kept(), reference.kept()
    assert torch.equal(inputs, exact_inputs)
    assert float((state - exact_state).abs().max() / exact_state.abs().max()) < 1e-5


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_operators), False])
@pytest.mark.parametrize("seed", range(6))
def test_a_sequence_goes_on_from_a_saved_state_as_from_its_own(seed: int, native: bool) -> None:
    """Whatever the cuts: the saved state is that behind its position, and what follows is the same."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    weights = make_weights(chance, generator)
    lengths = [chance.randint(2, 150) for _ in range(3)]
    rows = [torch.randn(length, weights.inputs, generator=generator) for length in lengths]
    net = CppDeltaNet(weights) if native else TorchDeltaNet(weights)
    plain, scene = Scene(net, weights, rows), Scene(net, weights, rows)
    scene.pool.reserve(12)
    positions = [sorted(chance.sample(range(1, length + 1), min(length, 2))) for length in lengths]
    for number, request in enumerate(scene.requests):
        request.saves = tuple((position, 6 + 2 * number + i) for i, position in enumerate(positions[number]))
    expected, found = plain.run([lengths]), scene.run(random_steps(chance, lengths))
    same = torch.equal if native else close
    assert all(same(a, b) for a, b in zip(expected, found, strict=True))
    for number, request in enumerate(scene.requests):
        for position, slot in request.saves:
            scene.requests[number] = RequestState(1, request.slot, restored_from=slot)
            scene.done[number], scene.found[number] = position, []
            left = [lengths[number] - position if i == number else 0 for i, _ in enumerate(lengths)]
            if any(left):
                scene.run_some(random_steps(chance, left))
                assert same(torch.cat(scene.found[number]), expected[number][position:])


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-4)


@needs_operators
@pytest.mark.parametrize("count", [1, 5])
def test_a_row_that_is_not_a_number_touches_no_other(count: int) -> None:
    chance, generator = random.Random(1), torch.Generator().manual_seed(1)
    weights = make_weights(chance, generator)
    rows = [torch.randn(20, weights.inputs, generator=generator) for _ in range(3)]
    steps = [[count] * 3] * 4
    expected = Scene(CppDeltaNet(weights), weights, rows).run(steps)
    rows[1] = torch.full_like(rows[1], math.nan)
    found = Scene(CppDeltaNet(weights), weights, rows).run(steps)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2]) and bool(found[1].isnan().all())


@needs_operators
def test_keys_that_are_too_long_for_the_operator_are_computed_by_torch() -> None:
    weights = make_weights(random.Random(0), torch.Generator())
    assert isinstance(delta_net(weights, CPU, torch.float32), CppDeltaNet)
    assert isinstance(delta_net(weights, CPU, torch.float16), TorchDeltaNet)
    object.__setattr__(weights, "key_dim", MOST_KEY_DIM + 1)
    assert isinstance(delta_net(weights, CPU, torch.float32), TorchDeltaNet)
