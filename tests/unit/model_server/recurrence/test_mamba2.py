"""Mamba-2 in C++: the torch one, to the bit the same however prompts are cut and whatever rows are beside."""

from __future__ import annotations

import math
import random

import pytest
import torch
from support.recurrent_scene import CPU, Scene, random_steps
from torch import Tensor

from model_server.cpp.library import usable
from model_server.recurrence.choice import mamba2
from model_server.recurrence.cpp import MOST_KEY_DIM, CppMamba2
from model_server.recurrence.mamba2 import Gating, Mamba2Weights, TorchMamba2

needs_operators = pytest.mark.skipif(not usable(CPU, torch.float32), reason="no C++ operators")


def make_weights(chance: random.Random, generator: torch.Generator) -> Mamba2Weights:
    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    groups, each, width = chance.choice([1, 2, 3]), chance.choice([1, 2]), chance.choice([1, 2, 4])
    state_size, head_dim = chance.choice([8, 17, 32, 64]), chance.choice([8, 24, 32, 40])
    heads = groups * each
    values = heads * head_dim
    channels = values + 2 * groups * state_size
    gatings = (
        None,
        Gating(1e-5),
        Gating(1e-5, "behind gates", noise(values), groups),
        Gating(1e-5, "before gates", noise(values), groups),
    )
    # With one group, it may have begun on the rank before.
    first = chance.choice([0, each]) if groups == 1 else 0
    return Mamba2Weights(
        heads=heads, head_dim=head_dim, groups=groups, state_size=state_size, first=first, heads_per_group=each + first,
        convolution=noise(width, channels), convolution_bias=chance.choice([None, noise(channels)]),
        rate=-noise(heads).exp().mul_(0.2), bias=noise(heads), skip=noise(heads),
        limits=chance.choice([(0.0, math.inf), (0.2, 0.8)]), gating=chance.choice(gatings),
    )  # fmt: skip


def row_width(weights: Mamba2Weights) -> int:
    return weights.values + weights.channels + weights.heads


@needs_operators
@pytest.mark.parametrize("seed", range(12))
def test_any_cut_gives_the_bits_of_the_whole_and_what_torch_gives(seed: int) -> None:
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    weights, dtype = make_weights(chance, generator), chance.choice([torch.float32, torch.bfloat16])
    lengths = [chance.randint(1, 150) for _ in range(chance.randint(1, 4))]
    rows = [torch.randn(length, row_width(weights), generator=generator).to(dtype) for length in lengths]
    native = CppMamba2(weights)
    whole, cut = Scene(native, weights, rows), Scene(native, weights, rows)
    reference = Scene(TorchMamba2(weights), weights, rows)
    found, expected = whole.run([lengths]), reference.run(random_steps(chance, lengths))
    for part, other, exact in zip(found, cut.run(random_steps(chance, lengths)), expected, strict=True):
        assert torch.equal(part, other)
        assert part.dtype is exact.dtype is (torch.float32 if weights.gating is None else dtype)
        error = float((part.float() - exact.float()).abs().max() / exact.float().abs().max())
        assert error < (1e-5 if dtype is torch.float32 else 1e-2)
    assert all(torch.equal(a, b) for a, b in zip(whole.kept(), cut.kept(), strict=True))
    (inputs, state), (exact_inputs, exact_state) = whole.kept(), reference.kept()
    assert torch.equal(inputs, exact_inputs)
    assert float((state - exact_state).abs().max() / exact_state.abs().max()) < 1e-5


@needs_operators
def test_a_row_that_is_not_a_number_touches_no_other() -> None:
    chance, generator = random.Random(1), torch.Generator().manual_seed(1)
    weights = make_weights(chance, generator)
    rows = [torch.randn(20, row_width(weights), generator=generator) for _ in range(3)]
    steps = [[5] * 3] * 4
    expected = Scene(CppMamba2(weights), weights, rows).run(steps)
    rows[1] = torch.full_like(rows[1], math.nan)
    found = Scene(CppMamba2(weights), weights, rows).run(steps)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2]) and bool(found[1].isnan().all())


@needs_operators
def test_states_that_are_too_long_for_the_operator_are_computed_by_torch() -> None:
    weights = make_weights(random.Random(0), torch.Generator())
    assert isinstance(mamba2(weights, CPU, torch.float32), CppMamba2)
    assert isinstance(mamba2(weights, CPU, torch.float16), TorchMamba2)
    object.__setattr__(weights, "state_size", MOST_KEY_DIM + 1)
    assert isinstance(mamba2(weights, CPU, torch.float32), TorchMamba2)
