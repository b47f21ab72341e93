"""Log probabilities of prompt tokens under raw logits."""

from __future__ import annotations

import pytest
import torch

from model_server.sampling import logprobs
from model_server.sampling.logprobs import prompt_scores


@pytest.mark.parametrize("chunk_elements", [1, 50, 10_000])
def test_equal_to_log_softmax_in_chunks_of_any_size(chunk_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", chunk_elements)
    logits = torch.randn(9, 25, generator=torch.Generator().manual_seed(0)) * 5
    ids = torch.arange(9) * 2
    before = logits.clone()
    wanted = logits.log_softmax(1)
    found = prompt_scores(logits, ids.tolist(), 3)
    torch.testing.assert_close(found.chosen, wanted[torch.arange(9), ids])
    best = wanted.topk(3)
    torch.testing.assert_close(found.top, best.values)
    assert torch.equal(found.top_ids, best.indices)
    assert torch.equal(logits, before)


def test_a_token_has_one_number_among_the_likeliest_too() -> None:
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(1)) * 5
    best = prompt_scores(logits, [0] * 40, 1)
    found = prompt_scores(logits, best.top_ids.flatten().tolist(), 2)
    assert torch.equal(found.chosen, found.top[:, 0])


@pytest.mark.parametrize(("count", "given"), [(0, 0), (9, 7)])
def test_no_more_likeliest_tokens_than_there_are(count: int, given: int) -> None:
    found = prompt_scores(torch.randn(2, 7), [0, 1], count)
    assert found.top.shape == found.top_ids.shape == (2, given)


def test_no_rows() -> None:
    found = prompt_scores(torch.empty(0, 7), [], 2)
    assert found.chosen.shape == (0,) and found.top.shape == found.top_ids.shape == (0, 2)
