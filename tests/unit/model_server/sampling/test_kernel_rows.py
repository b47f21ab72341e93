"""Which rows the kernels take and how their results join the others': with plain torch in the kernels' place."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model_server.sampling import sampler
from model_server.sampling.categorical import sample_columns, uniforms, weights
from model_server.sampling.filters import Filters, filter_whole
from model_server.sampling.kernel_rows import fits
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.sampler import HostSampled, Sampler

CPU = torch.device("cpu")
VOCAB = 40


def choose(logits: Tensor, taken: Any, bits: int, ids: Tensor, packed: Tensor) -> None:
    """`kernels.sampling.sample`, row by row."""
    for place, row in enumerate(taken.rows.tolist()):
        given = logits[row : row + 1].clone()
        failed = not bool(torch.isfinite(given.amax()))
        if place < taken.num_greedy:
            token, logprob = int(given.argmax()), float(given.log_softmax(1).amax())
        else:
            filters = Filters(
                temperature=taken.temperature[place].view(1, 1),
                top_k=taken.top_k[place].long().view(1, 1),
                dropped=taken.dropped[place].view(1, 1),
                min_p=taken.min_p[place].view(1, 1),
                typical_p=None,
                widest=VOCAB,
                num_candidates=VOCAB,
            )
            seed = taken.seeds[place : place + 1].numpy().view(np.uint64)
            number = uniforms(seed, taken.counts[place : place + 1].numpy().view(np.uint64))
            taken.counts[place] += 1
            values = filter_whole(given, filters, bits).values
            column, total = sample_columns(weights(values, bits), torch.from_numpy(number)[:, None])
            token = int(column)
            logprob = float(values[0, token]) - math.log(max(int(total), 1) / 2**bits)
        ids[row] = 0 if failed else token
        packed[:, row] = torch.tensor([0.0, 0.0, 1.0] if failed else [token, logprob, 0.0], dtype=torch.float64)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("model_server.kernels.sampling.sampling")
    module.__dict__.update(SampledRows=SimpleNamespace, sample=choose)
    monkeypatch.setitem(sys.modules, "model_server.kernels.sampling.sampling", module)
    monkeypatch.setattr(sampler, "usable", lambda device: True)


MIXED = [
    (SamplingParameters(top_p=0.7, seed=2**64 - 1), 0),
    (SamplingParameters(), 0),
    (SamplingParameters(typical_p=0.5, seed=3), 0),
    (SamplingParameters(do_sample=True, temperature=0.8, seed=4), 0),
    (SamplingParameters(do_sample=True, seed=5), 3),
    (SamplingParameters(repetition_penalty=1.5), 0),
    (SamplingParameters(top_k=5, min_p=0.1, seed=6), 0),
    (SamplingParameters(), 2),
]


def steps(asked: list[tuple[SamplingParameters, int]], num_steps: int) -> list[HostSampled]:
    subject = Sampler(VOCAB, CPU)
    rows = [subject.new_row(parameters, [1, 2, 3], 20, top) for parameters, top in asked]
    generator = torch.Generator().manual_seed(0)
    results = []
    for step in range(num_steps):
        logits = torch.randn(len(rows), VOCAB, generator=generator) * 2
        if step == 1:
            logits[3, 7] = logits[1, 7] = logits[2, 7] = math.nan
        results.append(subject.sample(logits, rows).to_host())
        if step == 2:  # another composition: counts go on where they were
            rows = rows[1:]
    return results


@pytest.mark.parametrize("which", [range(8), [1], [0, 3], [2, 4], [0, 1, 2]], ids=str)
def test_tokens_are_those_without_kernels(which: list[int], kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [MIXED[number] for number in which] if len(which) > 3 else [*(MIXED[n] for n in which), *MIXED[1:4]]
    with_kernels = steps(asked, 5)
    monkeypatch.setattr(sampler, "usable", lambda device: False)
    for one, other in zip(with_kernels, steps(asked, 5), strict=True):
        assert one.ids == other.ids
        assert one.failed == other.failed
        assert one.top == other.top
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_rows_for_plain_torch() -> None:
    subject = Sampler(VOCAB, CPU)
    taken = [fits(subject.new_row(parameters, [1], 20, top)) for parameters, top in MIXED]
    assert taken == [True, True, False, True, False, True, True, False]


def test_more_ties_than_are_looked_for_at_first() -> None:
    """Top tokens: ties of the last one count, the first ids up to a bound."""
    subject = Sampler(VOCAB, CPU)
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 1.0
    [top] = subject.sample(logits, [subject.new_row(SamplingParameters(), [1], 5, 2)]).to_host().top
    assert [token for token, _ in top] == [5, *(token for token in range(18) if token != 5)]
    assert top[1][1] == pytest.approx(-math.log(VOCAB - 1 + math.e))
