"""Random numbers, draws from them, rows that fail, and independence of the batch."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import sampling_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples

from model_server.sampling.categorical import sample_columns, uniforms, weight_bits, weights
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.row import SamplingRow
from model_server.sampling.sampler import Sampler

CPU = torch.device("cpu")


def uniform(seed: int, num_generated: int) -> float:
    return float(uniforms(np.array([seed], dtype=np.uint64), np.array([num_generated], dtype=np.uint64))[0])


def test_uniforms_are_splitmix64() -> None:
    """Against the published algorithm in Python's integers, over the whole range of seeds."""
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    for seed in (0, 1, 2, 42, 2**32, 2**63, 2**64 - 1):
        state = mix(seed)
        for number in range(20):
            state = (state + 0x9E3779B97F4A7C15) & mask
            assert uniform(seed, number) == (mix(state) >> 11) / 2**53


def test_uniforms_look_uniform() -> None:
    seeds = np.repeat(np.arange(500, dtype=np.uint64), 40)
    numbers = np.tile(np.arange(40, dtype=np.uint64), 500)
    values = uniforms(seeds, numbers)
    assert ((values >= 0) & (values < 1)).all()
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    expected = len(values) / 50
    assert float(((counts - expected) ** 2 / expected).sum()) < 95  # chi-square, 49 degrees: 1 in 10 000
    grid = values.reshape(500, 40)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize("width", [5, 2048, 2049, 5000, 5120])
def test_draws_invert_the_cumulative_distribution(width: int) -> None:
    rng = np.random.default_rng(width)
    x = torch.from_numpy(rng.normal(0, 2, (40, width)).astype(np.float32))
    x[:, rng.integers(0, width, width // 3)] = -math.inf
    x -= x.amax(1, keepdim=True)
    numbers = rng.random(40)
    weight = weights(x, weight_bits(width))
    ids, total = sample_columns(weight, torch.from_numpy(numbers)[:, None])
    for row in range(40):
        exact = [int(w) for w in weight[row]]
        assert int(total[row]) == sum(exact)
        target, cumulative = int(np.float64(numbers[row]) * np.float64(sum(exact))), 0
        for wanted in range(width):
            cumulative += exact[wanted]
            if cumulative > target:
                break
        assert int(ids[row]) == wanted


@pytest.mark.parametrize("width", [7, 3000])
def test_the_ends_of_the_unit_interval_stay_inside(width: int) -> None:
    x = torch.full((2, width), -math.inf)
    x[:, 2] = x[:, 5] = 0.0
    ids, _ = sample_columns(weights(x, weight_bits(width)), torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    assert ids.flatten().tolist() == [2, 5]


@given(data=st.data())
@settings(max_examples=examples(15, 240), deadline=None)
def test_choices_equal_the_reference(data: st.DataObject) -> None:
    x = data.draw(st.lists(st.integers(-8000, 8000).map(lambda n: n / 1000), min_size=12, max_size=12))
    parameters = SamplingParameters(
        temperature=data.draw(st.sampled_from([0.5, 1.0, 1.7])),
        top_k=data.draw(st.sampled_from([0, 5])),
        top_p=data.draw(st.sampled_from([1.0, 0.8])),
        seed=data.draw(st.integers(0, 2**64 - 1)),
        do_sample=True,
    )
    subject = Sampler(12, CPU)
    row = subject.new_row(parameters, [0], 10)
    warped = reference.warp(x, parameters)
    for number in range(3):
        result = subject.sample(torch.tensor([x]), [row]).to_host()
        wanted, distance = reference.choose(warped, uniform(parameters.seed, number))
        if warped.margin > 1e-5 and distance > 1e-5:
            assert result.ids == [wanted]
            assert result.logprobs[0] == pytest.approx(warped.logprobs[wanted], abs=1e-5)


@pytest.mark.parametrize(
    "values",
    [{"do_sample": True}, {"temperature": 1.6}, {"top_k": 6, "top_p": 0.9}, {"top_p": 0.85}, {"typical_p": 0.8}],
    ids=str,
)
def test_draws_follow_the_distribution(values: dict[str, float]) -> None:
    """Chi-square over 20 000 draws with fixed seeds."""
    x = torch.tensor([1.5, 0.2, -0.7, 1.1, 0.0, 2.0, -2.0, 0.9, 0.4, -1.0])
    batch, steps = 1000, 20
    subject = Sampler(10, CPU)
    rows = [subject.new_row(SamplingParameters(seed=seed, **values), [0], 100) for seed in range(batch)]
    counts = np.zeros(10)
    for _ in range(steps):
        np.add.at(counts, subject.sample(x.repeat(batch, 1), rows).to_host().ids, 1)
    wanted = reference.warp(x.tolist(), SamplingParameters(**values)).logprobs
    assert set(np.flatnonzero(counts)) == set(wanted)
    chi = sum((counts[i] - math.exp(v) * batch * steps) ** 2 / (math.exp(v) * batch * steps) for i, v in wanted.items())
    assert chi < 34  # 9 degrees: 1 in 10 000


MIX = [
    {},
    {"temperature": 0.7},
    {"do_sample": True},
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 40, "temperature": 1.3},
    {"top_p": 0.6},
    {"top_p": 0.95, "repetition_penalty": 1.2},
    {"min_p": 0.1, "frequency_penalty": 0.5},
    {"typical_p": 0.7},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "absolute_frequency_penalty": 0.3},
    {"watermark": True, "temperature": 0.9},
    {"logit_bias": ((7, 3.0), (8, -3.0)), "top_k": 2000},
]


@pytest.mark.parametrize("width", [64, 3000])
def test_a_row_does_not_feel_its_batch(width: int) -> None:
    """Each request alone against the same requests in batches that shrink, merge and change order at every step."""
    steps, rng = 8, random.Random(width)
    logits = torch.randn(len(MIX), steps, width, generator=torch.Generator().manual_seed(7)) * 3
    parameters = [SamplingParameters(seed=100 + n, **values) for n, values in enumerate(MIX)]
    prompts = [[rng.randrange(width) for _ in range(1 + 3 * n)] for n in range(len(MIX))]
    alone: list[list[tuple[int, float, list[tuple[int, float]]]]] = []
    for n in range(len(MIX)):
        subject = Sampler(width, CPU)
        row = subject.new_row(parameters[n], prompts[n], steps, n % 3)
        alone.append([])
        for step in range(steps):
            host = subject.sample(logits[n, step : step + 1].clone(), [row]).to_host()
            alone[n].append((host.ids[0], host.logprobs[0], host.top[0]))

    shared = Sampler(width, CPU)
    rows: list[SamplingRow] = [shared.new_row(parameters[n], prompts[n], steps, n % 3) for n in range(len(MIX))]
    done = [0] * len(MIX)
    while min(done) < steps:
        members = [n for n in range(len(MIX)) if done[n] < steps and rng.random() < 0.6]
        rng.shuffle(members)
        for _ in range(rng.randrange(1, 4)):  # the same batch for a few steps
            if not members or any(done[n] >= steps for n in members):
                break
            host = shared.sample(
                torch.stack([logits[n, done[n]] for n in members]), [rows[n] for n in members]
            ).to_host()
            for place, n in enumerate(members):
                assert (host.ids[place], host.logprobs[place], host.top[place]) == alone[n][done[n]]
                done[n] += 1


def test_a_resumed_row_goes_on_with_the_same_numbers() -> None:
    parameters = SamplingParameters(temperature=0.9, repetition_penalty=1.3, seed=5, watermark=True)
    logits = torch.randn(10, 1, 200, generator=torch.Generator().manual_seed(1))
    subject = Sampler(200, CPU)
    row = subject.new_row(parameters, [3, 4], 10)
    whole = [subject.sample(x.clone(), [row]).to_host().ids[0] for x in logits]
    again = subject.new_row(parameters, [3, 4, *whole[:6]], 10, num_generated=6)
    assert [subject.sample(x.clone(), [again]).to_host().ids[0] for x in logits[6:]] == whole[6:]


def test_histories_grow_past_their_first_room() -> None:
    parameters = SamplingParameters(absolute_frequency_penalty=0.5, repetition_penalty=1.01)
    subject = Sampler(8, CPU)
    row = subject.new_row(parameters, [0], 300)
    x = torch.linspace(0.0, 1.0, 8)
    generated: list[int] = []
    for _ in range(300):
        adjusted = reference.adjust(x.tolist(), [0], generated, parameters)
        best = sorted(adjusted, reverse=True)
        [chosen] = subject.sample(x[None].clone(), [row]).to_host().ids
        if best[0] - best[1] > 1e-3:
            assert chosen == adjusted.index(best[0])
        generated.append(chosen)
    # One token beyond what was asked for (a step in flight when the request ended) still fits.
    subject.sample(x[None].clone(), [row])


@pytest.mark.parametrize("values", MIX, ids=str)
@pytest.mark.parametrize("width", [64, 3000])
def test_a_broken_row_fails_alone(values: dict[str, float], width: int) -> None:
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(2)) * 3
    x[1, 3] = math.nan
    x[2] = math.nan
    x[3] = -math.inf
    x[4, 1] = math.inf
    parameters = SamplingParameters(seed=3, **values)
    if parameters.logit_bias:
        x[2, 3] = 1.0
    subject = Sampler(width, CPU)
    result = subject.sample(x.clone(), [subject.new_row(parameters, [1, 2], 5, 2) for _ in range(6)]).to_host()
    assert result.failed == [False, True, True, True, True, False]
    assert [result.ids[n] for n in (1, 2, 3, 4)] == [0] * 4
    assert [result.logprobs[n] for n in (1, 2, 3, 4)] == [0.0] * 4
    assert [result.top[n] for n in (1, 2, 3, 4)] == [[]] * 4
    healthy = Sampler(width, CPU)
    rows = [healthy.new_row(parameters, [1, 2], 5, 2) for _ in range(2)]
    wanted = healthy.sample(x[[0, 5]].clone(), rows).to_host()
    assert wanted.ids == [result.ids[0], result.ids[5]]
    assert wanted.logprobs == [result.logprobs[0], result.logprobs[5]]
    assert wanted.top == [result.top[0], result.top[5]]


def test_only_allowed_tokens_are_ever_drawn() -> None:
    """Masked rows, many draws, each path."""
    x = torch.full((200, 3000), -math.inf)
    allowed = {17, 256, 511, 2999}
    x[:, sorted(allowed)] = torch.tensor([0.0, -3.0, -6.0, 1.0])
    for values in MIX[1:9]:
        subject = Sampler(3000, CPU)
        rows = [subject.new_row(SamplingParameters(seed=n, **values), [1], 5) for n in range(200)]
        assert set(subject.sample(x.clone(), rows).to_host().ids) <= allowed


def test_the_next_step_needs_nothing_from_the_host() -> None:
    """Step n + 1 may be sampled before step n's ids were asked for."""
    parameters = SamplingParameters(temperature=0.8, repetition_penalty=1.5, seed=9)
    logits = torch.randn(6, 1, 300, generator=torch.Generator().manual_seed(4))
    subject = Sampler(300, CPU)
    row, late = subject.new_row(parameters, [1], 6), subject.new_row(parameters, [1], 6)
    now = [subject.sample(x.clone(), [row]).to_host().ids for x in logits]
    pending = [subject.sample(x.clone(), [late]) for x in logits]
    assert [step.to_host().ids for step in pending] == now
    assert [step.ids.tolist() for step in pending] == now


@pytest.mark.parametrize(
    ("parameters", "prompt"),
    [
        (SamplingParameters(), []),
        (SamplingParameters(logit_bias=((10, 1.0),)), [1]),
        (SamplingParameters(logit_bias=((-1, 1.0),)), [1]),
        (SamplingParameters(repetition_penalty=1.1), [10]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(parameters: SamplingParameters, prompt: list[int]) -> None:
    with pytest.raises(ValueError, match=r"prompt|vocabulary"):
        Sampler(10, CPU).new_row(parameters, prompt, 5)


@pytest.mark.parametrize(
    ("values", "samples"),
    [
        ({}, False),
        ({"do_sample": True}, True),
        ({"temperature": 0.5}, True),
        ({"top_k": 1}, True),
        ({"top_p": 0.9}, True),
        ({"typical_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"repetition_penalty": 1.5, "frequency_penalty": 1.0, "watermark": True, "logit_bias": ((1, 1.0),)}, False),
    ],
)
def test_what_counts_as_sampled(values: dict[str, float], samples: bool) -> None:
    assert SamplingParameters(**values).samples is samples


def test_no_rows() -> None:
    result = Sampler(10, CPU).sample(torch.empty(0, 10), [])
    assert result.ids.shape == (0,)
    assert result.to_host().ids == []


@pytest.mark.parametrize("width", [64, 3000])
@pytest.mark.parametrize("step", [0.0, 0.25])
def test_whole_rows_and_candidates_choose_alike(width: int, step: float) -> None:
    """What a device that cannot be looked at computes, against what a CPU computes; peaked, flat and tied rows."""
    generator = torch.Generator().manual_seed(11)
    spread = torch.tensor([6.0, 0.3, 2.0]).repeat(len(MIX))[:, None]
    subjects = [Sampler(width, CPU), Sampler(width, CPU)]
    subjects[1]._may_look = False
    parameters = [SamplingParameters(seed=n, **MIX[n % len(MIX)]) for n in range(3 * len(MIX))]
    batches = [[s.new_row(p, [1, 2], 9, n % 4) for n, p in enumerate(parameters)] for s in subjects]
    for _ in range(6):
        x = torch.randn(3 * len(MIX), width, generator=generator) * spread
        if step:
            x = (x / step).round() * step
        a, b = (s.sample(x.clone(), rows).to_host() for s, rows in zip(subjects, batches, strict=True))
        assert a == b
