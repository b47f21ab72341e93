"""Mamba-1's halves in C++: the torch ones, to the bit the same however prompts are cut and whatever rows are beside."""

from __future__ import annotations

import math
import random

import pytest
import torch
from support.recurrent_scene import CPU, Scene, random_steps
from torch import Tensor

from model_server.cpp.library import usable
from model_server.recurrence.choice import kept_convolution, mamba1
from model_server.recurrence.cpp import MOST_KEY_DIM, CppKeptConvolution, CppMamba1
from model_server.recurrence.mamba1 import KeptWeights, Mamba1Weights, TorchKeptConvolution, TorchMamba1
from model_server.recurrence.segments import Segments
from model_server.recurrence.states import LayerStates, StateShape

needs_operators = pytest.mark.skipif(not usable(CPU, torch.float32), reason="no C++ operators")


class Halves:
    """Both halves after one another, as products stand between them: what the second one reads comes first."""

    def __init__(self, seed: int, *, native: bool) -> None:
        chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.channels, self.width = chance.choice([8, 17, 32, 64, 90]), chance.choice([2, 4])
        size = chance.choice([1, 8, 16, 33])
        bias = chance.choice([None, noise(self.channels)])
        kept = KeptWeights(weight=noise(self.width, self.channels), bias=bias, row_width=2 * self.channels)
        rate = -noise(size, self.channels).exp().mul_(0.2)
        self.weights = Mamba1Weights(rate=rate, bias=noise(self.channels), skip=noise(self.channels))
        self.convolution = (CppKeptConvolution if native else TorchKeptConvolution)(kept)
        self.recurrence = (CppMamba1 if native else TorchMamba1)(self.weights)

    def state_shape(self, dtype: torch.dtype) -> StateShape:
        return self.weights.state_shape(self.width, dtype)

    def rows(self, length: int, generator: torch.Generator) -> Tensor:
        return torch.randn(length, 3 * self.channels + 2 * self.weights.state_size, generator=generator)

    def __call__(self, rows: Tensor, segments: Segments, states: LayerStates) -> Tensor:
        mixed = self.convolution(rows[:, : 2 * self.channels], segments, states.inputs_alone)
        read = torch.cat((mixed, rows[:, self.channels :]), dim=1)
        return torch.cat((mixed, self.recurrence(read, segments, states.state_alone)), dim=1)


def given_rows(halves: Halves, seed: int, lengths: list[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [halves.rows(length, generator).to(dtype) for length in lengths]


@needs_operators
@pytest.mark.parametrize("seed", range(12))
def test_any_cut_gives_the_bits_of_the_whole_and_what_torch_gives(seed: int) -> None:
    chance = random.Random(seed)
    halves, reference = Halves(seed, native=True), Halves(seed, native=False)
    dtype = chance.choice([torch.float32, torch.bfloat16])
    lengths = [chance.randint(1, 150) for _ in range(chance.randint(1, 4))]
    rows = given_rows(halves, seed, lengths, dtype)
    whole, cut, torchs = Scene(halves, halves, rows), Scene(halves, halves, rows), Scene(reference, reference, rows)
    found, expected = whole.run([lengths]), torchs.run(random_steps(chance, lengths))
    for part, other, exact in zip(found, cut.run(random_steps(chance, lengths)), expected, strict=True):
        assert torch.equal(part, other)
        assert part.dtype is exact.dtype is dtype
        error = float((part.float() - exact.float()).abs().max() / exact.float().abs().max())
        assert error < (1e-5 if dtype is torch.float32 else 2e-2)
    assert all(torch.equal(a, b) for a, b in zip(whole.kept(), cut.kept(), strict=True))
    (inputs, state), (exact_inputs, exact_state) = whole.kept(), torchs.kept()
    assert torch.equal(inputs, exact_inputs)
    bound = 1e-5 if dtype is torch.float32 else 2e-2  # of inputs that are rounded
    assert float((state - exact_state).abs().max() / exact_state.abs().max()) < bound


def test_chunks_of_torch_give_what_its_steps_give() -> None:
    halves = Halves(3, native=False)
    rows = given_rows(halves, 3, [75, 40], torch.float32)
    whole, single = Scene(halves, halves, rows), Scene(halves, halves, rows)
    expected = single.run([[1, 1]] * 40 + [[1, 0]] * 35)
    for part, other in zip(whole.run([[75, 40]]), expected, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-5, atol=1e-5)
    for one, other in zip(whole.kept(), single.kept(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@needs_operators
def test_a_row_that_is_not_a_number_touches_no_other() -> None:
    halves = Halves(1, native=True)
    rows = given_rows(halves, 1, [20] * 3, torch.float32)
    expected = Scene(halves, halves, rows).run([[5] * 3] * 4)
    rows[1] = torch.full_like(rows[1], math.nan)
    found = Scene(halves, halves, rows).run([[5] * 3] * 4)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2]) and bool(found[1].isnan().all())


def test_each_half_saves_its_own() -> None:
    """Copies between two halves of a step must not keep one of them as it was before."""
    states = LayerStates(torch.zeros(2, 3, 4), torch.zeros(2, 1, 5, 4))
    states.inputs[0], states.state[0] = 1.0, 2.0
    states.inputs_alone.copy([(0, 1)])
    assert bool((states.inputs[1] == 1).all()) and bool((states.state[1] == 0).all())
    states.inputs[0] = 3.0
    states.state_alone.copy([(0, 1)])
    assert bool((states.inputs[1] == 1).all()) and bool((states.state[1] == 2).all())


@needs_operators
def test_halves_are_chosen_by_type_and_size() -> None:
    halves = Halves(0, native=False)
    kept = KeptWeights(weight=torch.zeros(2, 4), bias=None, row_width=8)
    assert isinstance(kept_convolution(kept, CPU, torch.float32), CppKeptConvolution)
    assert isinstance(kept_convolution(kept, CPU, torch.float16), TorchKeptConvolution)
    assert isinstance(mamba1(halves.weights, CPU, torch.float32), CppMamba1)
    assert isinstance(mamba1(halves.weights, CPU, torch.float16), TorchMamba1)
    channels = torch.zeros(4)
    long = Mamba1Weights(rate=torch.zeros(MOST_KEY_DIM + 1, 4), bias=channels, skip=channels)
    assert isinstance(mamba1(long, CPU, torch.float32), TorchMamba1)
