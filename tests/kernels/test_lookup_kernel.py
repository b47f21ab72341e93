"""Drafts from the requests' own tokens by one kernel: what plain torch finds."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from support.triton_interpreter import mend

from model_server.features.drafts.drafters.lookup import look_up_on, plain
from model_server.kernels.speculation.lookup import look_up_rows

mend()

TRACES = [
    ([5, 6, 7, 8, 5, 6, 7], 4, [8, 5, 6, 7]),
    ([1, 2, 3, 1, 2, 3, 1], 5, [2, 3, 1, 2, 3]),
    ([9, 4, 4], 3, [4]),
    ([3, 8, 5], 4, []),
    ([1, 2, 9, 1, 2, 8, 1, 2], 3, [8, 1]),
    ([4, 1, 2, 3, 6, 1, 2, 3, 7, 5, 1, 2, 3], 4, [7, 5, 1, 2]),
]


@pytest.mark.parametrize(("ids", "most", "expected"), TRACES)
def test_known_traces(device: torch.device, ids: list[int], most: int, expected: list[int]) -> None:
    history = torch.tensor([ids + [ids[-1]] * 9], dtype=torch.int32, device=device)
    drafts, counts = look_up_rows(history, torch.tensor([len(ids)], device=device), most)
    assert counts.tolist() == [len(expected)]
    assert drafts.tolist() == [expected + [0] * (most - len(expected))]


@pytest.mark.parametrize("most", [1, 3, 5, 15])
@pytest.mark.parametrize("words", [2, 5, 1000])
def test_as_plain_torch(device: torch.device, most: int, words: int) -> None:
    """Rows of a wider tensor, with lengths up to more than two tiles."""
    seeds = torch.Generator().manual_seed(words)
    history = torch.randint(words, (9, 2600), generator=seeds, dtype=torch.int32)
    history[-1, 1000:1010] = history[-1, 2490:2500]
    lengths = torch.tensor([1, 2, 3, 9, 1023, 1024, 1025, 2050, 2500])
    wanted = plain(history, lengths, most)
    drafts, counts = look_up_rows(history.to(device), lengths.to(device), most)
    assert torch.equal(counts.cpu(), wanted[1]) and torch.equal(drafts.cpu(), wanted[0])
    assert words == 1000 or counts[-1] > 0
    assert counts[-1] == most or words < 1000


def test_kernels_are_chosen_where_they_run(device: torch.device) -> None:
    assert look_up_on(device) is look_up_rows
    drafts, counts = look_up_rows(torch.zeros(0, 5, dtype=torch.int32, device=device), torch.zeros(0), 3)
    assert drafts.shape == (0, 3) and counts.shape == (0,)
