"""Whatever the router lets in gives numbers: every parameter at the ends of its range, alone and together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples

from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.sampler import Sampler

CPU = torch.device("cpu")
WIDTH = 70
PROMPT = [1, 2, 2, 5, 69]
LEAST, SMALL, MOST = (
    2.0**-149,
    1e-38,
    3.4028234663852886e38,
)  # of float32: denormal, just below the normal ones, largest

POSITIVE = [LEAST, SMALL, 1e-3, 0.5, 1.0, 2.0, 1e30, MOST]
UNIT = [LEAST, SMALL, 0.5, 1 - 2.0**-24, 1.0]
PENALTY = [-2.0, -SMALL, 0.0, SMALL, 2.0]
RANGES: dict[str, list[Any]] = {
    "temperature": POSITIVE,
    "repetition_penalty": POSITIVE,
    "top_k": [0, 1, 2, 2**31 - 1],
    "top_p": UNIT,
    "typical_p": UNIT,
    "min_p": [0.0, *UNIT],
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "absolute_frequency_penalty": PENALTY,
    "logit_bias": [(), ((2, 100.0), (3, -100.0)), ((2, LEAST),), tuple((i, -100.0) for i in range(WIDTH))],
    "do_sample": [False, True],
    "watermark": [False, True],
    "seed": [0, 2**64 - 1],
}
SCALES = [0.0, 1e-3, 10.0, 1e37]


def logits(scale: float, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1)).clamp(-4, 4)
    return (drawn * scale).to(dtype).float()


def run(parameters: SamplingParameters, scale: float, dtype: torch.dtype) -> None:
    for top_n in (0, 3):
        subject = Sampler(WIDTH, CPU)
        row = subject.new_row(parameters, PROMPT, 10, top_n, num_generated=2)
        for _ in range(2):
            result = subject.sample(logits(scale, dtype), [row]).to_host()
            assert result.failed == [False]
            assert 0 <= result.ids[0] < WIDTH and math.isfinite(result.logprobs[0])
            assert bool(result.top[0]) == bool(top_n)
            assert all(math.isfinite(logprob) for _, logprob in result.top[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in RANGES.items() for value in values])
def test_alone(name: str, value: Any, dtype: torch.dtype) -> None:
    for scale in SCALES:
        for do_sample in (False, True):
            run(SamplingParameters(**{"do_sample": do_sample, name: value}), scale, dtype)


@given(
    st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in RANGES.items()}),
    st.sampled_from(SCALES),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=examples(60, 2000), deadline=None)
def test_together(values: dict[str, Any], scale: float, dtype: torch.dtype) -> None:
    run(SamplingParameters(**values), scale, dtype)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_of_the_model_that_are_no_numbers_still_fail(bad: float) -> None:
    subject = Sampler(WIDTH, CPU)
    row = subject.new_row(SamplingParameters(repetition_penalty=0.5), PROMPT, 10)
    scores = logits(1.0, torch.float32)
    scores[0, PROMPT[0]] = bad
    assert subject.sample(scores, [row]).to_host().failed == [True]
