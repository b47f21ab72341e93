"""Log probabilities of prompt tokens under raw logits."""

from __future__ import annotations

import pytest
import torch

from model_server.sampling import logprobs
from model_server.sampling.logprobs import prompt_logprobs


@pytest.mark.parametrize("chunk_elements", [1, 50, 10_000])
def test_equal_to_log_softmax_in_chunks_of_any_size(chunk_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", chunk_elements)
    logits = torch.randn(9, 25, generator=torch.Generator().manual_seed(0)) * 5
    ids = torch.arange(9) * 2
    before = logits.clone()
    wanted = logits.log_softmax(1)[torch.arange(9), ids]
    torch.testing.assert_close(prompt_logprobs(logits, ids), wanted)
    assert torch.equal(logits, before)


def test_no_rows() -> None:
    assert prompt_logprobs(torch.empty(0, 7), torch.empty(0, dtype=torch.int64)).shape == (0,)
