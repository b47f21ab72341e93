"""Drafts that a device finds, in plain torch: those of the host's search."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from model_server.features.drafts.drafters.lookup import plain
from model_server.features.drafts.lookup import History

TRACES = [
    ([5, 6, 7, 8, 5, 6, 7], 4, [8, 5, 6, 7]),
    ([1, 2, 3, 1, 2, 3, 1], 5, [2, 3, 1, 2, 3]),
    ([9, 4, 4], 3, [4]),
    ([3, 8, 5], 4, []),
    ([1, 2, 9, 1, 2, 8, 1, 2], 3, [8, 1]),
    ([4, 1, 2, 3, 6, 1, 2, 3, 7, 5, 1, 2, 3], 4, [7, 5, 1, 2]),
    ([4], 4, []),
]


def found(histories: list[list[int]], most: int, junk: int) -> list[list[int]]:
    """The drafts of these requests in one call; behind their tokens are others."""
    width = max(map(len, histories)) + 3
    history = torch.tensor([ids + [junk] * (width - len(ids)) for ids in histories], dtype=torch.int32)
    drafts, counts = plain(history, torch.tensor([len(ids) for ids in histories]), most)
    assert drafts.shape == (len(histories), most) and drafts.dtype == counts.dtype == torch.int64
    assert all(not row[count:].any() for row, count in zip(drafts, counts.tolist(), strict=True))
    return [row[:count] for row, count in zip(drafts.tolist(), counts.tolist(), strict=True)]


def test_known_traces() -> None:
    for ids, most, expected in TRACES:
        assert found([ids], most, junk=ids[-1]) == [expected]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4), st.integers(1, 15))
def test_as_the_host_does(histories: list[list[int]], most: int) -> None:
    expected = []
    for ids in histories:
        history = History()
        history.follow(ids)
        expected.append(history.draft(most))
    assert found(histories, most, junk=histories[0][-1]) == expected
