"""Texts without their stop: the same whether they are streamed in pieces or answered at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.answers.stops import StopHoldBack, StopSearch, ended_by_stop, without_stop

PIECES = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=8)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(PIECES, STOPS)
def test_a_stream_says_what_a_json_answer_says(pieces: list[str], stops: list[str]) -> None:
    generated: list[str] = []
    stopped = False
    for piece in pieces:  # as the shard does: the text ends right after the first match
        ends = [length for length in range(1, len(piece) + 1) if ends_with(generated, piece[:length], stops)]
        generated.append(piece[: ends[0]] if ends else piece)
        if stopped := bool(ends):
            break
    hold_back = StopHoldBack(stops)
    streamed = [hold_back.push(piece) for piece in generated[:-1]]
    streamed.append(hold_back.finish(generated[-1], stopped=stopped))
    reason = "stop_sequence" if stopped else "eos_token"
    assert "".join(streamed) == without_stop("".join(generated), stops, reason)


@given(PIECES, STOPS, st.booleans())
def test_a_search_finds_what_a_shard_finds(pieces: list[str], stops: list[str], keeps_stop: bool) -> None:
    text, reason = "", "eos_token"
    for character in "".join(pieces):
        text += character
        if stops and text.endswith(tuple(stops)):
            reason = "stop_sequence"
            break
    search = StopSearch(stops, keeps_stop=keeps_stop)
    said = "".join([search.push(piece) for piece in pieces]) + search.end()
    assert said == (text if keeps_stop else without_stop(text, stops, reason))  # type: ignore[arg-type]
    assert (search.found is not None) == (reason == "stop_sequence")


def test_a_stop_text_that_does_not_count_yet_is_passed_over() -> None:
    search = StopSearch(["ab"])
    assert search.push("xab", counts=False) + search.push("y a") == "xaby "
    assert search.push("bz") == "" and search.found == "ab"


def ends_with(generated: list[str], piece: str, stops: list[str]) -> bool:
    return bool(stops) and ("".join(generated) + piece).endswith(tuple(stops))


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [("a b", "stop_sequence", True), ("a b", "length", True), ("a c", "length", False), ("a b", "eos_token", False)],
)
def test_a_stop_that_the_last_allowed_token_completed_counts(text: str, reason: str, expected: bool) -> None:
    assert ended_by_stop(text, ["b"], reason) is expected  # type: ignore[arg-type]
