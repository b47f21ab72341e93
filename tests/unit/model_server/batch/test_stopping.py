"""When a request ends, and where its text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples

from model_server.batch.results import FinishReason
from model_server.batch.stopping import StoppingState
from model_server.sampling.parameters import StoppingParameters

EOS = frozenset({2, 9})
LENGTH, EOS_TOKEN, STOP = FinishReason.LENGTH, FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE


@pytest.mark.parametrize(
    ("options", "tokens", "wanted"),
    [
        # (token id, streamed text) per step; what each step answers
        ({}, [(1, "a"), (1, "b"), (1, "c")], [None, None, LENGTH]),
        ({}, [(1, "a"), (2, "</s>")], [None, EOS_TOKEN]),
        ({}, [(9, "<|end|>")], [EOS_TOKEN]),
        ({}, [(1, "a"), (1, "b"), (2, "</s>")], [None, None, LENGTH]),  # length beats end
        ({"ignore_eos_token": True}, [(2, "</s>"), (2, "</s>"), (1, "x")], [None, None, LENGTH]),
        ({"stop_sequences": ("ab",)}, [(1, "xa"), (1, "b")], [None, STOP]),
        ({"stop_sequences": ("ab",)}, [(1, "ab\n")], [STOP]),
        ({"stop_sequences": ("ab", "c")}, [(1, "c")], [STOP]),
        ({"stop_sequences": (".*",)}, [(1, "x"), (1, ".*")], [None, STOP]),  # literal, no pattern
        ({"stop_sequences": ("",)}, [(1, "x"), (1, "")], [None, None]),
        ({"stop_sequences": ("</s>",), "ignore_eos_token": True}, [(2, "</s>")], [STOP]),  # literal text of specials
        ({"stop_sequences": ("</s>",)}, [(2, "</s>")], [EOS_TOKEN]),  # end beats stop text
        ({"stop_token_ids": frozenset({7}), "ignore_eos_token": True}, [(2, "</s>"), (7, "x")], [None, EOS_TOKEN]),
        ({"stop_sequences": ("z",)}, [(1, "x"), (1, "y"), (1, "z")], [None, None, LENGTH]),  # length beats stop text
        ({"stop_sequences": ("é€",)}, [(1, "é"), (1, ""), (1, "€")], [None, None, LENGTH]),
        ({"stop_sequences": ("ab",)}, [(1, "xabc")], [STOP]),
        ({"stop_sequences": ("ab",)}, [(1, "xa"), (1, "bc")], [None, STOP]),
        ({"stop_sequences": ("",)}, [(1, "x"), (1, "")], [None, None]),
    ],
)
def test_rules(options: dict[str, object], tokens: list[tuple[int, str]], wanted: list[FinishReason | None]) -> None:
    state = StoppingState(StoppingParameters(max_new_tokens=3, **options), EOS)  # type: ignore[arg-type]
    assert [state.check(*token) for token in tokens] == wanted
    assert state.num_tokens == len(tokens)


@pytest.mark.parametrize("length", [1, 199, 200, 201, 299, 300, 301, 1000])
@pytest.mark.parametrize("piece", [1, 7, 260])
def test_long_stop_text_is_not_lost(length: int, piece: int) -> None:
    stop = "".join(chr(0x4E00 + n) for n in range(length))
    parameters = StoppingParameters(max_new_tokens=10**6, stop_sequences=(stop,))
    state = StoppingState(parameters, EOS)
    text = "x" * 777 + stop
    pieces = [text[start : start + piece] for start in range(0, len(text), piece)]
    answers = [state.check(1, one) for one in pieces]
    assert answers[-1] is STOP
    assert set(answers[:-1]) <= {None}


@given(
    pieces=st.lists(st.text("abc", max_size=4), min_size=1, max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
)
@settings(max_examples=examples(75, 1200), deadline=None)
def test_an_answer_ends_with_the_first_match(pieces: list[str], stops: list[str]) -> None:
    parameters = StoppingParameters(max_new_tokens=1000, stop_sequences=tuple(stops))
    state = StoppingState(parameters, EOS)
    text = ""
    reason = None
    for piece in pieces:
        text += piece
        reason = state.check(1, piece)
        if reason is not None:
            break
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if reason is None:
        assert not ends
        assert state.cut(text) == text
    else:
        assert len(text) - len(piece) < ends[0] <= len(text)
        assert state.cut(text) == text[: ends[0]]


def test_stop_text_cuts_for_every_reason() -> None:
    """The last token may end the request for a reason that comes first in the order; its text is cut all the same."""
    parameters = StoppingParameters(max_new_tokens=2, stop_sequences=("END",))
    state = StoppingState(parameters, EOS)
    assert state.check(1, "textE") is None
    assert state.check(1, "ND more") is LENGTH
    assert state.cut("textEND more") == "textEND"


def test_stop_text_does_not_cut_what_the_final_text_does_not_show() -> None:
    """A special token that completes the stop text is not part of the final text."""
    parameters = StoppingParameters(max_new_tokens=9, stop_sequences=("<|e",))
    state = StoppingState(parameters, frozenset())
    assert state.check(1, "text") is None
    assert state.check(5, "<|end|>") is STOP
    assert state.cut("text") == "text"


def test_stop_text_before_the_least_length_does_not_count() -> None:
    parameters = StoppingParameters(max_new_tokens=9, stop_sequences=("ab",))
    state = StoppingState(parameters, EOS, min_tokens=3)
    texts = ["ab", "xab", "a", "b"]
    assert [state.check(1, text) for text in texts] == [None, None, None, STOP]
    assert state.cut("abxabab") == "abxabab"


def test_what_followed_stop_text_that_did_not_count_is_not_cut() -> None:
    parameters = StoppingParameters(max_new_tokens=2, stop_sequences=("ab",))
    state = StoppingState(parameters, EOS, min_tokens=2)
    assert [state.check(1, text) for text in ("x", "abc")] == [None, LENGTH]
    assert state.cut("xabc") == "xabc"
