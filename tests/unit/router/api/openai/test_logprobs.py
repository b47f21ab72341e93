"""Names and bytes of tokens in log probabilities."""

from __future__ import annotations

import numpy as np

from router.api.openai.logprobs import TokenNames, chat_logprob
from router.events import Token

BYTES = {1: b"\xf0\x9f", 2: b"\x99\x82", 3: b"\xf0\x9f\x99", 4: b" a", 5: b"a", 6: b"</s>", 7: b"b"}
NAMES = TokenNames(BYTES)


def token(number: int, text: str, logprob: float = -1.0) -> Token:
    return Token(number, text, np.float32(logprob))


def test_a_token_has_one_name_and_one_number() -> None:
    """Part of a character says nothing in the answer, and is shown as such alone; the completing one says all of it."""
    for number, text, name in ((1, "", "\\xf0\\x9f"), (2, "🙂", "\\x99\\x82")):
        tops = [token(number, "\ufffd", -1.0001), token(3, "\ufffd", -2.0)]
        found = chat_logprob(NAMES, token(number, text), tops)
        own, other = found["top_logprobs"]
        assert found | {"top_logprobs": None} == own | {"top_logprobs": None}
        assert (own["token"], bytes(own["bytes"]), own["logprob"]) == (name, BYTES[number], -1.0)
        assert (other["token"], bytes(other["bytes"])) == ("\\xf0\\x9f\\x99", BYTES[3])


def test_alternatives_keep_the_space_that_decoders_drop() -> None:
    found = chat_logprob(NAMES, token(7, "b"), [token(7, "b"), token(4, "a"), token(5, "a")])
    assert [top["token"] for top in found["top_logprobs"]] == ["b", " a", "a"]
    assert [bytes(top["bytes"]) for top in found["top_logprobs"]] == [b"b", b" a", b"a"]


def test_text_of_the_answer_is_a_tokens_name() -> None:
    """Where the decoder makes something else of it than the vocabulary says; but not what a broken character left."""
    assert NAMES.chosen(token(4, "a")).name == "a"
    assert NAMES.chosen(token(5, "\ufffda")).name == "a"
    assert NAMES.chosen(token(6, "</s>")).name == "</s>"
