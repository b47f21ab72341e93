"""What is refused, with which status and words, and in which order; nothing a client sends gives a 500."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from router_fakes import LIMITS, Router, data_of
from tokenizers import Tokenizer

from router.config import RouterConfig
from router.schemas.chat import ChatBody
from router.schemas.completion import CompletionBody
from router.schemas.parameters import UNSERVED

MakeRouter = Callable[..., Router]

INTEGERS = ["best_of", "top_k", "max_new_tokens", "truncate", "seed", "top_n_tokens"]
FLOATS = ["temperature", "repetition_penalty", "frequency_penalty", "top_p", "typical_p", "min_p"]
BOOLEANS = ["do_sample", "return_full_text", "watermark", "details", "decoder_input_details", "ignore_eos"]
HUGE = "9" * 5000
CHAT_INTEGERS = ["max_tokens", "max_completion_tokens", "top_logprobs", "n", "seed", "top_k"]
COMPLETION_INTEGERS = ["max_tokens", "logprobs", "n", "best_of", "seed", "top_k"]
CHAT_FLOATS = ["temperature", "top_p", "frequency_penalty", "presence_penalty", "repetition_penalty"]


def native(field: str, literal: str) -> bytes:
    return f'{{"inputs":"Hi","parameters":{{"{field}":{literal}}}}}'.encode()


def chat(field: str, literal: str) -> bytes:
    return f'{{"messages":[{{"role":"user","content":"Hi"}}],"{field}":{literal}}}'.encode()


def completion(field: str, literal: str) -> bytes:
    return f'{{"prompt":"Hi","{field}":{literal}}}'.encode()


async def refused(router: Router, path: str, raw: bytes, *statuses: int) -> dict[str, str]:
    answer = await router.post(path, raw=raw)
    assert answer.status_code in statuses, (raw[:200], answer.status_code, answer.text)
    body = answer.json()
    assert list(body) == ["error", "error_type"] and all(isinstance(value, str) for value in body.values())
    assert len(body["error"]) < 1000
    assert router.scheduler.submitted == []
    router.assert_idle()
    return dict(body)


async def test_every_numeric_field_refuses_what_is_no_such_number(router: Router) -> None:
    bad_for_all = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", str(2**70), HUGE, "true", '"20"', "[]", "{}"]
    for path, build, integers, floats in (
        ("/generate", native, INTEGERS, FLOATS),
        ("/generate_stream", native, INTEGERS, FLOATS),
        ("/v1/chat/completions", chat, CHAT_INTEGERS, CHAT_FLOATS),
        ("/v1/completions", completion, COMPLETION_INTEGERS, CHAT_FLOATS),
    ):
        for field in integers:
            for literal in [*bad_for_all, "20.0", "1.5", "-1" if field != "top_k" else "-0.0", "1e3"]:
                await refused(router, path, build(field, literal), 422)
        for field in floats:
            for literal in [*bad_for_all, "1e39", "-1e39"]:
                await refused(router, path, build(field, literal), 422)


async def test_what_is_zero_in_32_bits_is_zero(router: Router) -> None:
    """It would be one on the wire too, where zero means "not given"."""
    for field in ("temperature", "repetition_penalty", "top_p", "typical_p"):
        await refused(router, "/generate", native(field, "1e-60"), 422)
    assert (await router.post("/v1/chat/completions", raw=chat("temperature", "1e-60"))).status_code == 200
    assert not router.scheduler.last.sampling.do_sample


async def test_every_boolean_and_text_field_refuses_other_types(router: Router) -> None:
    for field in BOOLEANS:
        for literal in ("1", "0", '"true"', "[]", "{}"):
            await refused(router, "/generate", native(field, literal), 422)
    for field, literals in {
        "stop": ('"x"', "[1]", "[null]", "{}", "1"),
        "adapter_id": ("1", "[]", "true"),
        "grammar": ('"x"', "1", '{"type":"bnf","value":"x"}', "{}"),
    }.items():
        for literal in literals:
            await refused(router, "/generate", native(field, literal), 422)
    for field, literals in {
        "stop": ("1", "[1]", "{}"),
        "stream": ("1", '"true"'),
        "logprobs": ("1", '"true"'),
        "stream_options": ("true", '"x"', '{"include_usage":1}'),
        "model": ("1", "{}"),
        "logit_bias": ('"x"', '{"1":"x"}', "1"),
        "tools": ('"x"', "[1]", '[{"type":"function"}]', "{}"),
        "tool_choice": ("1", "[]", '{"type":"function"}'),
        "response_format": ('"json"', '{"type":"yaml"}', "[]"),
    }.items():
        for literal in literals:
            await refused(router, "/v1/chat/completions", chat(field, literal), 422)
    for field, literals in {
        "stop": ("1", "[1]", "{}"),
        "stream": ("1", '"true"'),
        "echo": ("1", '"true"'),
        "suffix": ("1", "[]"),
        "stream_options": ("true", '"x"', '{"include_usage":1}'),
        "logit_bias": ('"x"', '{"1":"x"}', "1"),
    }.items():
        for literal in literals:
            await refused(router, "/v1/completions", completion(field, literal), 422)


@pytest.mark.parametrize(
    "messages",
    ["[]", "{}", "null", '"Hi"', "[1]", "[{}]", '[{"content":"x"}]', '[{"role":1,"content":"x"}]',
     '[{"role":"user","content":1}]', '[{"role":"user","content":[{"type":"audio"}]}]',
     '[{"role":"user","content":[{"type":"text"}]}]', '[{"role":"user","content":[1]}]',
     '[{"role":"user","content":["x"]}]', '[{"role":"user","content":{"type":"text","text":"x"}}]',
     '[{"role":"assistant","tool_calls":{}}]', '[{"role":"assistant","tool_calls":[{"id":"1"}]}]',
     "[" + ",".join(['{"role":"user","content":"x"}'] * 10_001) + "]"],
)  # fmt: skip
async def test_malformed_messages(router: Router, messages: str) -> None:
    raw = f'{{"messages":{messages}}}'.encode()
    body = await refused(router, "/v1/chat/completions", raw, 422)
    assert "messages" in body["error"]


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b'{"inputs":"x"', 400),
        (b"{'inputs':'x'}", 400),
        (b'{"inputs":"x",}', 400),
        (b'{"inputs":"a\nb"}', 400),
        (b'{"inputs":"\xff\xfe"}', 400),
        (b'{"inputs":"\\ud800"}', 400),
        (b'{"inputs":"\\udc00\\ud800"}', 400),
        (b'{"inputs":"a\\udc80"}', 400),
        (b'{"inputs":"\\uDfFf","parameters":{"stop":["\\udc80"]}}', 400),
        # Its escaped quotes must not each be the beginning of another search to the end.
        (b"[" + b"[]," * 130 + b'"' + b'\\"' * 500_000, 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"inputs":' + b"[" * 130 + b"]" * 130 + b"}", 400),
        (b'{"inputs":"x","parameters":{"grammar":' + b'{"a":' * 200 + b"1" + b"}" * 202, 400),
        (b"null", 422),
        (b"[]", 422),
        (b'"x"', 422),
        (b"{}", 422),
        (b'{"inputs":null}', 422),
        (b'{"inputs":["x"]}', 422),
        (b'{"inputs":1}', 422),
        (b'{"inputs":"x","parameters":[]}', 422),
        (b'{"inputs":"x","inputs":"y"}', 422),
        (b'{"inputs":"x","parameters":{"seed":1,"seed":2}}', 422),
        (b'{"inputs":"x","unknown":' + HUGE.encode() + b"}", 422),
    ],
)
async def test_broken_bodies(router: Router, raw: bytes, status: int) -> None:
    for path in ("/generate", "/generate_stream", "/", "/tokenize"):
        body = await refused(router, path, raw, status)
        assert body["error_type"] == {400: "bad_request", 422: "validation"}[status]
    await refused(router, "/v1/chat/completions", raw, 400, 422)
    await refused(router, "/v1/completions", raw, 400, 422)


@pytest.mark.parametrize(
    "raw", [b'{"inputs":"a\\u0000b"}', b'\xef\xbb\xbf{"inputs":"x"}', b'{"inputs":"\\ud83d\\ude00"}']
)
async def test_odd_but_valid_bodies_are_served(router: Router, raw: bytes) -> None:
    assert (await router.post("/generate", raw=raw)).status_code == 200


async def test_a_megabyte_without_a_space(router: Router) -> None:
    answer = await router.post("/generate", {"inputs": "x" * 1_000_000})
    assert answer.status_code == 422 and "or more `inputs` tokens" in answer.json()["error"]
    answer = await router.post("/generate", {"inputs": "x" * 1_000_000, "parameters": {"truncate": 7}})
    assert answer.status_code == 200 and router.scheduler.last.input_length == 7


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
        assert answer.status_code == 422 and answer.json()["error_type"] == "validation"
        assert re.search("`inputs` must have less than 2000 tokens. Given: 200[1-9] or more$", answer.json()["error"])
    assert all(length < 10 for length in cut)
    answer = await router.post("/generate", {"inputs": too_long, "parameters": {"max_new_tokens": 100}})
    words = "Given: 2001 or more `inputs` tokens and 100 `max_new_tokens`"
    assert f"`inputs` tokens + `max_new_tokens` must be <= 2048. {words}" in answer.json()["error"]
    answer = await router.post("/generate", {"inputs": fits})
    assert answer.status_code == 422 and "or more" not in answer.json()["error"] and cut[-1] == len(fits)


async def test_content_types(router: Router) -> None:
    raw = b'{"inputs":"x"}'
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"):
        answer = await router.request("POST", "/generate", content=raw, headers={"content-type": content_type})
        assert answer.status_code == 415 and answer.json()["error_type"] == "unsupported_media_type"
    for content_type in (
        "application/json",
        "application/json; charset=utf-8",
        "application/vnd.api+json",
        "Application/JSON",
    ):
        answer = await router.request("POST", "/generate", content=raw, headers={"content-type": content_type})
        assert answer.status_code == 200


async def test_bodies_over_the_limit_with_and_without_a_length(make_router: MakeRouter) -> None:
    router = make_router(config=RouterConfig(payload_limit=1000))

    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 100

    headers = {"content-type": "application/json"}
    for content in (b" " * 1001, chunks()):
        answer = await router.request("POST", "/generate", content=content, headers=headers)
        assert answer.status_code == 413 and answer.json()["error_type"] == "payload_too_large"
    fits = b'{"inputs":"x"}'
    answer = await router.request("POST", "/generate", content=fits + b" " * (1000 - len(fits)), headers=headers)
    assert answer.status_code == 200


async def test_unknown_paths_and_wrong_methods_answer_json(router: Router) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404), ("POST", "/v1", 404), ("GET", "/generate", 405),
        ("DELETE", "/info", 405), ("PUT", "/v1/chat/completions", 405), ("POST", "/health", 405),
        ("POST", "/generate/", 404),
    ):  # fmt: skip
        answer = await router.request(method, path)
        assert answer.status_code == status, (method, path)
        assert list(answer.json()) == ["error", "error_type"]


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
        assert answer.status_code == 422, rule
        length = len(await router.tokenizer.encode(asked["inputs"], add_special_tokens=True, truncate=None))
        expected = words.replace("{n}", str(length))
        assert answer.json() == {"error": f"Input validation error: {expected}", "error_type": "validation"}, rule
    router.assert_idle()
    assert router.scheduler.submitted == []


async def test_the_first_rule_that_is_broken_answers(router: Router) -> None:
    for (first, words), (second, _) in itertools.pairwise(RULES[1:10]):
        answer = await router.post("/generate", a_request(second | first))
        assert words in answer.json()["error"]
    everything = {name: value for rule, _ in RULES[1:] for name, value in rule.items() if name not in ("best_of",)}
    answer = await router.post("/generate", a_request(everything))
    assert "`temperature`" in answer.json()["error"]


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
    router.scheduler.fits = False
    answer = await router.post("/generate", {"inputs": "Hi"})
    assert answer.status_code == 422 and "cache" in answer.json()["error"]


async def test_streams_refuse_best_of_and_prefill_details_before_a_permit(make_router: MakeRouter) -> None:
    router = make_router(limits=replace(LIMITS, max_concurrent_requests=1))
    assert router.inference.permit_pool.take(1)
    for path, extra in (("/generate_stream", {}), ("/", {"stream": True})):
        for parameters in ({"best_of": 2}, {"best_of": 0}, {"decoder_input_details": True}):
            answer = await router.post(path, {"inputs": "Hi", "parameters": parameters} | extra)
            assert answer.status_code == 422 and "streaming" in answer.json()["error"]
    answer = await router.post("/generate", {"inputs": "Hi", "parameters": {"best_of": 3}})
    assert answer.status_code == 422 and "<= 2. Given: 3" in answer.json()["error"]
    answer = await router.post("/generate", {"inputs": "", "parameters": {"temperature": 0.0}})
    assert answer.status_code == 429, "permits come before the rest of validation"


async def test_best_of_can_be_turned_off(make_router: MakeRouter) -> None:
    router = make_router(limits=replace(LIMITS, max_best_of=1))
    answer = await router.post("/generate", {"inputs": "Hi", "parameters": {"best_of": 2, "do_sample": True}})
    assert answer.status_code == 422 and "`best_of`" in answer.json()["error"]
    assert (await router.post("/generate", {"inputs": "Hi", "parameters": {"best_of": 1}})).status_code == 200


async def test_stop_texts_are_bounded_in_bytes(router: Router) -> None:
    for texts, status in ((["é" * 2048], 200), (["é" * 2048, "x"], 422)):
        answer = await router.post("/generate", {"inputs": "Hi", "parameters": {"stop": texts}})
        assert answer.status_code == status


async def test_an_error_nobody_foresaw_says_nothing(make_router: MakeRouter) -> None:
    def script(request: Any) -> Any:
        raise ZeroDivisionError("secret")

    router = make_router(script)
    answer = await router.post("/generate", {"inputs": "Hi"})
    assert answer.status_code == 500
    assert answer.json() == {"error": "internal error", "error_type": "internal"}
    router.assert_idle()


async def test_nor_inside_of_a_stream(make_router: MakeRouter) -> None:
    router = make_router(lambda request: [])  # the fake runs out of events with an IndexError
    answer = await router.post("/generate_stream", {"inputs": "Hi"})
    assert data_of(answer.content) == [{"error": "internal error", "error_type": "internal"}]
    answer = await router.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True})
    nested = {"message": "internal error", "http_status_code": 500, "type": "internal", "code": 500}
    assert data_of(answer.content) == [{"error": nested, "error_type": "internal"}, "[DONE]"]
    router.assert_idle()


@pytest.mark.parametrize("name", sorted(UNSERVED))
async def test_what_other_servers_have_and_would_change_the_answer_is_refused_by_name(
    router: Router, name: str
) -> None:
    neutral, remedy = UNSERVED[name]
    for path, build, body_type in (
        ("/v1/chat/completions", chat, ChatBody),
        ("/v1/completions", completion, CompletionBody),
    ):
        if name in body_type.model_fields:
            continue
        for literal in ('"x"', "7", "true" if True not in neutral else "false"):
            body = await refused(router, path, build(name, literal), 422)
            assert f"`{name}` is not served here: {remedy}" in body["error"]
        for value in (None, *neutral):
            body_type.model_validate_json(build(name, json.dumps(value)))
