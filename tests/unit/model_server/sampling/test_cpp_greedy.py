"""The native greedy choice against torch."""

from __future__ import annotations

import math

import pytest
import torch

from model_server.cpp.greedy import greedy
from model_server.cpp.library import library
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.sampler import Sampler

CPU = torch.device("cpu")
SIZES = [1, 7, 64, 4096, 4097, 50000]


@pytest.mark.parametrize("width", SIZES)
def test_equals_torch(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = 4 * torch.randn(5, width, generator=generator)
    logits[2] = logits[2].round()  # ties: the lowest id
    logits[3, : width // 2] = -math.inf
    if library() is None:
        sampler = Sampler(width, CPU)
        rows = [sampler.new_row(SamplingParameters(), [0], 1) for _ in logits]
        assert sampler.sample(logits, rows).to_host().ids == [int((r == r.max()).nonzero()[0]) for r in logits]
        return
    ids, peak, total = greedy(logits)
    assert ids.flatten().tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]
    assert torch.equal(peak, logits.amax(1, keepdim=True))
    expected = (logits.double() - peak.double()).exp().sum(1, keepdim=True)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("place", [0, 5000, 9999])
def test_broken_rows_are_told(place: int) -> None:
    sampler = Sampler(10000, CPU)
    logits = torch.randn(3, 10000, generator=torch.Generator().manual_seed(0))
    logits[0, place] = math.nan
    logits[1] = -math.inf
    rows = [sampler.new_row(SamplingParameters(), [0], 1) for _ in logits]
    assert sampler.sample(logits, rows).to_host().failed == [True, True, False]


def test_infinite_logits() -> None:
    sampler = Sampler(128, CPU)
    logits = torch.zeros(1, 128)
    logits[0, 77] = math.inf
    row = sampler.new_row(SamplingParameters(), [0], 1)
    sampled = sampler.sample(logits, [row]).to_host()
    assert sampled.failed == [True] or sampled.ids == [77]
