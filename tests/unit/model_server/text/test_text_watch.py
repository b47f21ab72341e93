"""A text that wakes a grammar is found wherever the borders of tokens lie."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer, TokenizerWrapper

from model_server.text.watch import TextWatch
from wire.grammar import TextTrigger

PIECES = ("f", "(", "[", " ", "[f", "f(", "[f(", " [", "(x", "a", "<tag>", "g(")


class _Vocabulary:
    eos_token_id = len(PIECES)
    bos_token_id = None
    tokens = (*(piece.encode() for piece in PIECES), b"</s>")
    special_token_ids = (len(PIECES),)

    def __call__(self, text: bytes) -> list[int]:
        return []


VOCABULARY = LLTokenizer(TokenizerWrapper(_Vocabulary()))
TOKENS = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)


def ids(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


def added(watch: TextWatch, token_ids: Iterable[int]) -> list[list[int]]:
    return [watch.add(token_id) for token_id in token_ids]


@pytest.mark.parametrize("pieces", [("[", "f", "("), ("[f", "("), ("[", "f("), ("[f(",), (" [", "f", "(x")])
def test_it_is_given_the_tokens_that_hold_the_text(pieces: tuple[str, ...]) -> None:
    watch = TextWatch(TextTrigger(("[f(",)), VOCABULARY)
    found = added(watch, ids("a", "[f", *pieces))
    assert found == [[]] * (1 + len(pieces)) + [ids(*pieces)]
    assert added(watch, ids("a", "[f(")) == [[], ids("[f(")]


def test_only_the_beginning_of_an_answer() -> None:
    trigger = TextTrigger(("[f(", "[g("), behind=("", "<tag>"))
    for before in ((), (" ",), ("<tag>",), (" ", "<tag>")):
        assert added(TextWatch(trigger, VOCABULARY), ids(*before, "[", "g("))[-1] == ids("[", "g(")
    for before in (("a",), ("[",), ("<tag>", "a"), ("[f", "a")):
        assert not any(added(TextWatch(trigger, VOCABULARY), ids(*before, "[", "g(", "[f(")))


@given(TOKENS, TOKENS, st.sampled_from([None, ("",), ("", "<tag>")]))
def test_drafts_end_before_the_text(given: list[int], draft: list[int], behind: tuple[str, ...] | None) -> None:
    trigger = TextTrigger(("[f(", "g("), behind)
    one, other = TextWatch(trigger, VOCABULARY), TextWatch(trigger, VOCABULARY)
    added(one, given)
    added(other, given)
    before = one.before_trigger(draft)
    found = added(one, draft)  # the look ahead has changed nothing
    assert found == added(other, draft)
    first = next((number for number, tokens in enumerate(found) if tokens), len(draft))
    assert before == draft[:first]


@given(TOKENS)
def test_every_text_is_found(given: list[int]) -> None:
    found = added(TextWatch(TextTrigger(("[f(",)), VOCABULARY), given)
    text = ""
    for token_id, tokens in zip(given, found, strict=True):
        text, had = text + PIECES[token_id], text.count("[f(")
        assert bool(tokens) == (text.count("[f(") > had)
        assert not tokens or (tokens == given[: len(tokens)] or "[f(" in "".join(PIECES[one] for one in tokens))
