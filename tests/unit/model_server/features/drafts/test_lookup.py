"""Drafts from a request's own tokens: known traces, and any tokens against a plain search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_server.features.drafts.lookup import History, Prediction


def drafted(ids: list[int], most: int, forced: list[int] | None = None) -> list[int]:
    history = History()
    for length in range(1, len(ids) + 1):
        history.follow(ids[:length])
    return history.draft(most, forced or [])


@pytest.mark.parametrize(
    ("ids", "most", "expected"),
    [
        ([5, 6, 7, 8, 5, 6, 7], 4, [8, 5, 6, 7]),
        ([1, 2, 3, 1, 2, 3, 1], 5, [2, 3, 1, 2, 3]),
        ([9, 4, 4], 3, [4]),
        ([3, 8, 5], 4, []),
        ([1, 2, 9, 1, 2, 8, 1, 2], 3, [8, 1]),
        ([4, 1, 2, 3, 6, 1, 2, 3, 7, 5, 1, 2, 3], 4, [7, 5, 1, 2]),
        ([4], 4, []),
        ([1, 1, 1, 1], 0, []),
    ],
)
def test_known_traces(ids: list[int], most: int, expected: list[int]) -> None:
    assert drafted(ids, most) == expected


def plain(ids: list[int], most: int) -> list[int]:
    """The longest match of at most 8 tokens with the end, of equal ones the latest, and what follows it."""
    best, best_end = 0, -1
    for end in range(len(ids) - 1):
        length = 0
        while length < min(8, end + 1) and ids[end - length] == ids[len(ids) - 1 - length]:
            length += 1
        if length and length >= best:
            best, best_end = length, end
    if not best:
        return []
    text = list(ids)
    for place in range(min(most, {1: 1, 2: 2, 3: 4}.get(best, most))):
        text.append(text[best_end + 1 + place])
    return text[len(ids) :]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 15), st.integers(0, 5))
def test_as_a_plain_search(ids: list[int], most: int, num_forced: int) -> None:
    assert drafted(ids, most) == plain(ids, most)
    known, forced = ids[: len(ids) - num_forced] or ids, ids[len(ids) - num_forced :] if num_forced < len(ids) else []
    assert drafted(known, most, forced) == plain(known + forced, most)


def test_a_history_of_any_length_is_kept() -> None:
    ids = [i % 701 for i in range(3000)]
    assert drafted(ids, 5) == [(3000 + i) % 701 for i in range(5)]


@pytest.mark.parametrize(
    ("prediction", "prompt", "generated", "most", "expected"),
    [
        ([5, 6, 7, 8, 9], [1], [5], 4, [6, 7, 8, 9]),  # from its beginning: all of it, after a single token
        ([5, 6, 7, 8, 9], [1], [2, 7], 4, [8]),  # elsewhere as short as after any match of one token
        ([5, 6, 7, 8, 9], [1], [2, 6, 7], 4, [8, 9]),
        ([4, 1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3, 7], [0], [0] * 4 + [1, 2, 3], 4, [9, 1, 2, 3]),  # the nearest
        ([5, 6], [1], [5, 6], 4, []),
        ([5, 6], [1], [7], 4, []),
    ],
)
def test_predictions(
    prediction: list[int], prompt: list[int], generated: list[int], most: int, expected: list[int]
) -> None:
    history = History()
    history.follow(prompt + generated)
    assert Prediction(prediction).guess(most, history.end(), len(generated)).ids == expected
    forced = generated[-1:]
    history = History()
    history.follow(prompt + generated[:-1])
    assert Prediction(prediction).guess(most, history.end(forced), len(generated)).ids == expected


def plainly_foretold(prediction: list[int], end: list[int], most: int, num_generated: int) -> list[int]:
    """What follows the longest match of at most 8 tokens, of equal ones the nearest, of these the first."""
    best = (0, 0, 0)
    for place in range(len(prediction)):
        length = 0
        while length < min(8, len(end), place + 1) and prediction[place - length] == end[-1 - length]:
            length += 1
        best = max(best, (length, -abs(place + 1 - num_generated), -place))
    matched, place = best[0], -best[2]
    if not matched:
        return []
    if not place + 1 == num_generated == matched:
        most = min(most, {1: 1, 2: 2, 3: 4}.get(matched, most))
    return prediction[place + 1 : place + 1 + most]


@given(
    st.lists(st.integers(0, 2), max_size=200), st.lists(st.integers(0, 2), max_size=30), st.integers(0, 9),
    st.integers(0, 12),
)  # fmt: skip
def test_predictions_as_a_plain_search(prediction: list[int], prompt: list[int], most: int, num_taken: int) -> None:
    """Of few places and of many: the answer is a piece of the prediction, or its beginning."""
    answer = prediction[len(prompt) : len(prompt) + num_taken] or prediction[:num_taken]
    history = History()
    history.follow(prompt + answer)
    found = Prediction(prediction).guess(most, history.end(), len(answer)).ids
    assert found == plainly_foretold(prediction, history.end(), most, len(answer))
