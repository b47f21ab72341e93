"""The rules of a request: their words, their order, their limits."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from router_fakes import LIMITS, Router, is_invalid, message_of
from tokenizers import Tokenizer

MakeRouter = Callable[..., Router]


async def test_a_prompt_whose_bytes_cannot_fit_is_not_cut(
    router: Router, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(map(len, tokenizer.get_vocab()))
    fits, too_long = "x" * (2000 * longest), "x" * (2000 * longest + 1)
    cut: list[int] = []
    encode = router.tokenizer.encode

    async def watched(text: str, **options: Any) -> list[int]:
        cut.append(len(text))
        return await encode(text, **options)

    monkeypatch.setattr(router.tokenizer, "encode", watched)
    chat_body = {"messages": [{"role": "user", "content": too_long}]}
    for path, body in (
        ("/generate", {"inputs": too_long, "parameters": {"max_new_tokens": 1}}),
        ("/generate_stream", {"inputs": too_long, "parameters": {"max_new_tokens": 1}}),
        ("/v1/completions", {"prompt": ["x", too_long], "max_tokens": 1}),
        ("/v1/chat/completions", chat_body | {"max_tokens": 1}),
    ):
        answer = await router.post(path, body)
        assert is_invalid(answer) and answer.json()["error_type"] == "validation"
        said = message_of(answer)
        if path.startswith("/v1/"):
            field = next(iter(body))
            assert re.fullmatch(
                f"`{field}` has 200[1-9] or more tokens: the maximum context length is 2000 tokens "
                r"\(context_length_exceeded\)",
                said,
            )
            assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (
                field, "context_length_exceeded",
            )  # fmt: skip
        else:
            assert re.search("`inputs` must have less than 2000 tokens. Given: 200[1-9] or more$", said)
    assert all(length < 10 for length in cut)
    answer = await router.post("/generate", {"inputs": too_long, "parameters": {"max_new_tokens": 100}})
    words = "Given: 2001 or more `inputs` tokens and 100 `max_new_tokens`"
    assert f"`inputs` tokens + `max_new_tokens` must be <= 2048. {words}" in message_of(answer)
    answer = await router.post("/generate", {"inputs": fits})
    assert is_invalid(answer) and "or more" not in message_of(answer) and cut[-1] == len(fits)


RULES: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 2}, "`best_of` > 1 requires sampling"),
    ({"temperature": 0.0}, "`temperature` must be > 0"),
    ({"temperature": -0.0}, "`temperature` must be > 0"),
    ({"repetition_penalty": 0.0}, "`repetition_penalty` must be > 0"),
    ({"frequency_penalty": 2.1}, "`frequency_penalty` must be in [-2, 2]"),
    ({"top_p": 1.1}, "`top_p` must be in (0, 1]"),
    ({"typical_p": 1.0}, "`typical_p` must be in (0, 1)"),
    ({"top_k": 0}, "`top_k` must be > 0"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be > 0"),
    ({"stop": ["1", "2", "3", "4", "5"]}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"seed": 1, "best_of": 2, "do_sample": True}, "`seed` cannot be combined with `best_of` > 1"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"inputs": ""}, "`inputs` cannot be empty"),
    ({"truncate": 0}, "`truncate` must be in 1..=2000. Given: 0"),
    (
        {"max_new_tokens": 1025, "inputs": "ab " * 1500},
        "`inputs` tokens + `max_new_tokens` must be <= 2048. Given: {n} `inputs` tokens and 1024 `max_new_tokens`",
    ),
    ({"inputs": "ab " * 1000, "max_new_tokens": 1}, "`inputs` must have less than 2000 tokens. Given: {n}"),
    ({"min_tokens": 6, "max_new_tokens": 5}, "`min_tokens` must be <= `max_new_tokens`. Given: 6 and 5"),
    ({"adapter_id": "x/y"}, "`adapter_id` x/y is not known to this server"),
    ({"grammar": {"type": "regex", "value": "x("}}, "grammar is not valid: unclosed group"),
]


def a_request(rules: dict[str, Any]) -> dict[str, Any]:
    parameters = {name: value for name, value in rules.items() if name != "inputs"}
    return {"inputs": rules.get("inputs", "Hi"), "parameters": parameters}


async def test_each_rule_has_its_words(router: Router) -> None:
    for rule, words in RULES:
        asked = a_request(rule)
        answer = await router.post("/generate", asked)
        assert is_invalid(answer), rule
        length = len(await router.tokenizer.encode(asked["inputs"], add_special_tokens=True, truncate=None))
        expected = words.replace("{n}", str(length))
        assert answer.json() == {"error": f"Input validation error: {expected}", "error_type": "validation"}, rule
    router.assert_idle()
    assert router.scheduler.submitted == []


async def test_the_first_rule_that_is_broken_answers(router: Router) -> None:
    for (first, words), (second, _) in itertools.pairwise(RULES[1:10]):
        answer = await router.post("/generate", a_request(second | first))
        assert words in message_of(answer)
    everything = {name: value for rule, _ in RULES[1:] for name, value in rule.items() if name not in ("best_of",)}
    answer = await router.post("/generate", a_request(everything))
    assert "`temperature`" in message_of(answer)


async def test_the_limits_are_inclusive(make_router: MakeRouter) -> None:
    router = make_router(limits=replace(LIMITS, max_input_tokens=10, max_total_tokens=16))
    length = 5
    text = "dog" * 20
    while len(await router.tokenizer.encode(text, add_special_tokens=True, truncate=None)) > length:
        text = text[:-1]
    assert len(await router.tokenizer.encode(text, add_special_tokens=True, truncate=None)) == length

    async def status(max_new_tokens: int | None) -> int:
        answer = await router.post("/generate", {"inputs": text, "parameters": {"max_new_tokens": max_new_tokens}})
        return answer.status_code

    assert await status(11) == 200
    assert router.scheduler.last.stopping.max_new_tokens == 11
    assert await status(12) == 422
    assert await status(None) == 200
    assert router.scheduler.last.stopping.max_new_tokens == 11
    router = make_router(limits=replace(LIMITS, max_input_tokens=length, max_total_tokens=16))
    assert await status(1) == 200
    router = make_router(limits=replace(LIMITS, max_input_tokens=length - 1, max_total_tokens=16))
    assert await status(1) == 422


async def test_long_generations_are_capped_exactly(make_router: MakeRouter) -> None:
    router = make_router(limits=replace(LIMITS, max_input_tokens=1999, max_total_tokens=2000))
    length = len(await router.tokenizer.encode("Hi", add_special_tokens=True, truncate=None))
    for asked, granted in ((1500, 1500), (2000 - length, 2000 - length), (100_000, 2000 - length)):
        await router.post("/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": asked}})
        assert router.scheduler.last.stopping.max_new_tokens == granted


async def test_what_can_never_fit_is_refused_at_once(router: Router) -> None:
    router.scheduler.most_new_tokens = lambda input_length, num_images=0: -1
    answer = await router.post("/generate", {"inputs": "Hi"})
    assert is_invalid(answer) and "cache" in message_of(answer)


async def test_streams_refuse_best_of_and_prefill_details_before_a_permit(make_router: MakeRouter) -> None:
    router = make_router(limits=replace(LIMITS, max_concurrent_requests=1))
    assert router.inference.permit_pool.acquire(1)
    for path, extra in (("/generate_stream", {}), ("/", {"stream": True})):
        for parameters in ({"best_of": 2}, {"best_of": 0}, {"decoder_input_details": True}):
            answer = await router.post(path, {"inputs": "Hi", "parameters": parameters} | extra)
            assert is_invalid(answer) and "streaming" in message_of(answer)
    answer = await router.post("/generate", {"inputs": "Hi", "parameters": {"best_of": 3}})
    assert is_invalid(answer) and "<= 2. Given: 3" in message_of(answer)
    answer = await router.post("/generate", {"inputs": "", "parameters": {"temperature": 0.0}})
    assert answer.status_code == 429, "permits come before the rest of validation"


async def test_best_of_can_be_turned_off(make_router: MakeRouter) -> None:
    router = make_router(limits=replace(LIMITS, max_best_of=1))
    answer = await router.post("/generate", {"inputs": "Hi", "parameters": {"best_of": 2, "do_sample": True}})
    assert is_invalid(answer) and "`best_of`" in message_of(answer)
    assert (await router.post("/generate", {"inputs": "Hi", "parameters": {"best_of": 1}})).status_code == 200


async def test_stop_texts_are_bounded_in_bytes(router: Router) -> None:
    for texts, status in ((["é" * 2048], 200), (["é" * 2048, "x"], 422)):
        answer = await router.post("/generate", {"inputs": "Hi", "parameters": {"stop": texts}})
        assert answer.status_code == status


async def test_tokens_that_end_an_answer(make_router: MakeRouter) -> None:
    body = {"prompt": "Hi", "max_tokens": 5}
    router = make_router()
    answer = await router.post("/v1/completions", body | {"stop_token_ids": [3, 4]})
    assert answer.status_code == 200 and router.scheduler.last.stopping.stop_token_ids == (3, 4)
    for ids, fault in (([10**9], "not in the vocabulary"), (list(range(65)), "up to 64 tokens"), ([-1], "")):
        answer = await router.post("/v1/completions", body | {"stop_token_ids": ids})
        assert is_invalid(answer) and fault in message_of(answer)


async def test_more_tokens_than_the_most_cannot_be_asked_for_on_any_route(router: Router) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, body in (
        ("/v1/completions", {"prompt": "Hi", "min_tokens": 6, "max_tokens": 5}),
        ("/v1/chat/completions", chat | {"min_tokens": 6, "max_tokens": 5}),
        ("/v1/chat/completions", chat | {"min_tokens": 6, "max_completion_tokens": 5}),
        ("/v1/chat/completions", chat | {"min_tokens": 3000}),
        ("/vertex", {"instances": [chat | {"min_tokens": 6, "max_tokens": 5}]}),
    ):
        answer = await router.post(path, body)
        assert is_invalid(answer) and "`min_tokens` must be <= `max_" in message_of(answer), path
        name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        assert f"`{name}`" in message_of(answer), path
    answer = await router.post("/v1/chat/completions", chat | {"min_tokens": 5, "max_tokens": 5})
    assert answer.status_code == 200
