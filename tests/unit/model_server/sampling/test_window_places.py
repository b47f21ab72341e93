"""Choices for several places at once: those of as many steps, one after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from model_server.sampling.categorical import device_uniforms, uniforms
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.places import Places
from model_server.sampling.row import SamplingRow
from model_server.sampling.sampler import Sampler

VOCAB, PROMPT = 50, [3, 4, 5, 3]
KINDS = {
    "greedy": SamplingParameters(),
    "drawn": SamplingParameters(do_sample=True, temperature=3.0, seed=2**63 + 5),
    "top_k": SamplingParameters(do_sample=True, temperature=3.0, top_k=7, seed=1),
    "top_p": SamplingParameters(do_sample=True, temperature=3.0, top_p=0.8, seed=2),
    "min_p": SamplingParameters(do_sample=True, temperature=3.0, min_p=0.01, seed=3),
    "typical_p": SamplingParameters(do_sample=True, temperature=3.0, typical_p=0.7, seed=4),
    "repetition": SamplingParameters(repetition_penalty=3.0),
    "frequency": SamplingParameters(frequency_penalty=3.0),
    "presence": SamplingParameters(presence_penalty=4.0, do_sample=True, seed=5),
    "absolute": SamplingParameters(absolute_frequency_penalty=4.0),
    "bias": SamplingParameters(logit_bias=((7, 3.0),)),
    "min_tokens": SamplingParameters(min_tokens=4),
}


def test_random_numbers_of_the_device_are_those_of_the_host() -> None:
    seeds = np.array([0, 1, 2**63, 2**64 - 1, 12345], np.uint64)
    counts = np.array([0, 1, 2, 3, 10**9], np.uint64)
    found = device_uniforms(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(counts.view(np.int64)))
    assert found.tolist() == uniforms(seeds, counts).tolist()


def rows_of(sampler: Sampler, top: int) -> list[SamplingRow]:
    return [
        sampler.new_row(one, PROMPT, 30, top_n_tokens=top * (number % 2), end_ids=frozenset({9, 11}))
        for number, one in enumerate(KINDS.values())
    ]


@pytest.mark.parametrize("num_places", [1, 4])
@pytest.mark.parametrize("top", [0, 3])
def test_as_in_steps_of_their_own(num_places: int, top: int) -> None:
    """Drafts that are right all along: what each place chooses is what the steps chose."""
    logits = torch.randn(num_places, len(KINDS), VOCAB, generator=torch.Generator().manual_seed(num_places)) * 4
    logits[:, :, 9] += 6.0  # ends texts, where that is not barred
    plain = Sampler(VOCAB, torch.device("cpu"))
    rows = rows_of(plain, top)
    steps = [plain.sample(one.clone(), rows).to_host() for one in logits]

    sampler = Sampler(VOCAB, torch.device("cpu"))
    rows = rows_of(sampler, top)
    drafts = torch.tensor([step.ids for step in steps]).T
    history = torch.cat((torch.tensor([PROMPT] * len(rows)), drafts, torch.full((len(rows), 9), 7)), 1)
    number = torch.arange(num_places).expand(len(rows), -1)
    places = Places(number, history.int(), number + len(PROMPT), len(PROMPT) + num_places + 2)
    by_row: Tensor = logits.transpose(0, 1).reshape(-1, VOCAB).clone()
    found = sampler.sample_places(by_row, rows, places)
    assert found.ids.view(len(rows), -1).T.tolist() == [step.ids for step in steps]
    logprobs = torch.tensor([step.logprobs for step in steps], dtype=torch.float64)
    torch.testing.assert_close(found.packed[1].view(len(rows), -1).T, logprobs)
    tops = dict(pair for part in found.top for pair in part.to_host())
    for place, step in enumerate(steps):
        for row, wanted in enumerate(step.top):
            ids = [one for one, _ in tops.get(row * num_places + place, [])]
            assert ids == [one for one, _ in wanted]
    assert all(row.num_generated == 0 for row in rows)


def test_plain_steps_go_on_behind_places() -> None:
    """What the sampler kept of the rows before is forgotten."""
    sampler = Sampler(VOCAB, torch.device("cpu"))
    row = sampler.new_row(SamplingParameters(do_sample=True, seed=3, temperature=9.0), PROMPT, 30)
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3))
    wanted = [Sampler(VOCAB, torch.device("cpu")).sample(logits[:1].clone(), [row]).to_host().ids]
    first = sampler.new_row(row.parameters, PROMPT, 30)
    ids = [sampler.sample(logits[:1].clone(), [first]).to_host().ids]
    number = torch.arange(3)[None]
    sampler.sample_places(logits[:3].clone(), [first], Places(number + 1, torch.zeros(1, 9).int(), number + 5, 9))
    first.num_generated += 3
    ids.append(sampler.sample(logits[:1].clone(), [first]).to_host().ids)
    fresh = sampler.new_row(row.parameters, PROMPT, 30, num_generated=0)
    fresh.num_generated = 4
    wanted.append(Sampler(VOCAB, torch.device("cpu")).sample(logits[:1].clone(), [fresh]).to_host().ids)
    assert ids == wanted


def test_a_plain_step_frees_what_windows_counted() -> None:
    """Of penalised rows it is as wide as the vocabulary, for each place."""
    sampler = Sampler(VOCAB, torch.device("cpu"))
    rows = rows_of(sampler, 0)
    history = torch.tensor([PROMPT] * len(rows), dtype=torch.int32)
    counts = torch.zeros(len(rows), 1, dtype=torch.int64)
    sampler.sample_places(torch.zeros(len(rows), VOCAB), rows, Places(counts, history, counts + 4, 4))
    assert sampler._place_groups is not None
    sampler.sample(torch.zeros(len(rows), VOCAB), rows)
    assert sampler._place_groups is None
