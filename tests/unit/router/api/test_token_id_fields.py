"""Prompts of token ids on `/v1/completions`: served as they are, or by their text where the shards take texts only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import Router, is_invalid, message_of, says

from router.config import RouterConfig
from router.events import Prefilled, Token

MakeRouter = Callable[..., Router]
PATH = "/v1/completions"


def body(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt} | fields


async def pieces_of(router: Router, word: str) -> list[int]:
    """The word's letters one by one, where the tokenizer has fewer tokens for it."""
    encode = functools.partial(router.tokenizer.encode, add_special_tokens=False, truncate=None)
    pieces = [i for letter in word for i in await encode(letter)]
    assert await encode(word) != pieces
    return pieces


async def test_token_ids_whose_text_has_just_these_tokens(router: Router) -> None:
    ids = await router.tokenizer.encode("The dog über 日本", add_special_tokens=True, truncate=None)
    for asked, number in ((ids, 1), ([ids, list(ids[1:])], 2)):
        answer = await router.post(PATH, body(asked))
        assert answer.status_code == 200 and len(answer.json()["choices"]) == number
        sent = router.scheduler.submitted[-number:]
        assert list(sent[0].input_ids) == ids
        assert list(sent[-1].input_ids) == (ids if number == 1 else ids[1:])
    assert sent[0].inputs == "<s>The dog über 日本"


async def test_token_ids_that_no_text_has_are_served_as_they_are(router: Router) -> None:
    pieces = await pieces_of(router, "dog")
    ends_inside_of_a_character = await router.tokenizer.encode("日", add_special_tokens=False, truncate=1)
    for ids in (pieces, [0, 0, 1], ends_inside_of_a_character):
        answer = await router.post(PATH, body(ids))
        request = router.scheduler.last
        assert answer.status_code == 200 and list(request.input_ids) == ids and request.input_length == len(ids)
        assert answer.json()["usage"]["prompt_tokens"] == len(ids)
    assert router.scheduler.submitted[0].inputs == "dog"


@pytest.mark.parametrize("ids", [[99_999], [2**32 - 1, 1], [5, 400]])
async def test_token_ids_outside_of_the_vocabulary_are_refused(router: Router, ids: list[int]) -> None:
    answer = await router.post(PATH, body(ids))
    assert is_invalid(answer) and "token ids name token" in message_of(answer)
    assert router.scheduler.submitted == []
    router.assert_idle()


async def test_echo_and_offsets_of_token_ids(make_router: MakeRouter) -> None:
    def script(request: Any) -> Any:
        return [Prefilled(tuple(Token(i, f"t{i}", -0.5) for i in request.input_ids)), *says(" one")]

    config = RouterConfig(tokenizer_name="some/model", request_logprobs=True)
    router = make_router(script, config=config)
    letters = await pieces_of(router, "fox")
    character = await router.tokenizer.encode("日本", add_special_tokens=False, truncate=None)
    assert len(character) > 2, "some tokens are parts of characters"
    ids = [0, *letters, *character, *letters]
    choice = (await router.post(PATH, body(ids, echo=True, logprobs=0))).json()["choices"][0]
    assert choice["text"] == "<s>fox日本fox one"
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[:4] == [0, 3, 4, 5] and offsets[-4:] == [8, 9, 10, 11]
    assert offsets == sorted(offsets) and set(offsets[4:-4]) <= {6, 7} and len(offsets) == len(ids) + 1
