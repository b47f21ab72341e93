"""`min_tokens`: no token that ends the text is chosen before there are that many, whoever else is in the batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.row import SamplingRow
from model_server.sampling.sampler import Sampler

CPU = torch.device("cpu")
WIDTH = 20
END_IDS = frozenset({3, 7, WIDTH + 5})  # the last one is outside of the vocabulary
KINDS: list[dict[str, Any]] = [{}, {"do_sample": True, "seed": 5}, {"top_k": 2, "seed": 6}, {"top_p": 0.9, "seed": 7}]


def tending_to_end(step: int) -> torch.Tensor:
    """Logits [1, WIDTH] whose likeliest tokens are the two that end the text."""
    logits = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(step))
    logits[0, [3, 7]] = torch.tensor([40.0, 39.0])
    return logits


def row_of(sampler: Sampler, min_tokens: int, kind: dict[str, Any], resumed: tuple[int, ...] = ()) -> SamplingRow:
    parameters = SamplingParameters(min_tokens=min_tokens, **kind)
    return sampler.new_row(parameters, [1, 2, *resumed], 50, num_generated=len(resumed), end_ids=END_IDS)


def alone(min_tokens: int, kind: dict[str, Any], steps: int = 8, resumed: tuple[int, ...] = ()) -> list[int]:
    sampler = Sampler(WIDTH, CPU)
    row = row_of(sampler, min_tokens, kind, resumed)
    chosen = range(len(resumed), steps)
    return [sampler.sample(tending_to_end(step), [row]).to_host().ids[0] for step in chosen]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("min_tokens", [0, 1, 5])
def test_the_end_comes_when_it_may(kind: dict[str, Any], min_tokens: int) -> None:
    ids = alone(min_tokens, kind)
    assert [token_id in END_IDS for token_id in ids] == [step >= min_tokens for step in range(8)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_neighbours_change_nothing(kind: dict[str, Any]) -> None:
    sampler = Sampler(WIDTH, CPU)
    lengths = (5, 0, 2, 7)
    rows = [row_of(sampler, length, kind) for length in lengths]
    found: list[list[int]] = [[] for _ in rows]
    for step in range(8):
        order = [(step + place) % 4 for place in range(4)] if step % 3 else range(4)
        logits = torch.cat([tending_to_end(step) for _ in rows])
        for number, token_id in zip(order, sampler.sample(logits, [rows[n] for n in order]).to_host().ids, strict=True):
            found[number].append(token_id)
    assert found == [alone(length, kind) for length in lengths]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("stopped_at", [1, 4, 5, 6])
def test_a_preempted_request_counts_what_it_had(kind: dict[str, Any], stopped_at: int) -> None:
    whole = alone(5, kind)
    assert alone(5, kind, resumed=tuple(whole[:stopped_at])) == whole[stopped_at:]


def test_barred_tokens_are_not_among_the_likeliest() -> None:
    sampler = Sampler(WIDTH, CPU)
    row = sampler.new_row(SamplingParameters(min_tokens=1), [1], 5, 4, end_ids=END_IDS)
    first, second = (sampler.sample(tending_to_end(step), [row]).to_host() for step in range(2))
    assert not {token_id for token_id, _ in first.top[0]} & END_IDS and math.isfinite(first.logprobs[0])
    assert [token_id for token_id, _ in second.top[0]][:2] == [3, 7]


def test_a_model_without_an_end_token_has_nothing_to_bar() -> None:
    sampler = Sampler(WIDTH, CPU)
    row = sampler.new_row(SamplingParameters(min_tokens=3), [1], 5)
    assert sampler.sample(tending_to_end(0), [row]).to_host().ids == [3]
