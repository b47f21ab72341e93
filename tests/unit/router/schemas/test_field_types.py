"""Fields of every body: what is no such number, truth value, text or message is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from router_fakes import Router

from router.api.chat.schema import ChatBody
from router.api.platforms.schema import InferBody, VertexBody
from router.api.tgi.schema import GenerateBody
from router.schemas.base import Body

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


async def test_every_numeric_field_refuses_what_is_no_such_number(router: Router) -> None:
    bad_for_all = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", str(2**70), HUGE, "true", '"20"', "[]", "{}"]
    for path, build, integers, floats in (
        ("/generate", native, INTEGERS, FLOATS),
        ("/generate_stream", native, INTEGERS, FLOATS),
        ("/v1/chat/completions", chat, CHAT_INTEGERS, CHAT_FLOATS),
        ("/v1/completions", completion, COMPLETION_INTEGERS, CHAT_FLOATS),
    ):
        for field in integers:
            for literal in [
                *bad_for_all,
                "20.0",
                "1.5",
                "-2" if field != "seed" or not path.startswith("/v1") else "0.0",
                "1e3",
            ]:
                await router.refused(path, build(field, literal))
        for field in floats:
            for literal in [*bad_for_all, "1e39", "-1e39"]:
                await router.refused(path, build(field, literal))


async def test_what_is_zero_in_32_bits_is_zero(router: Router) -> None:
    """It would be one on the wire too, where zero means "not given"."""
    for field in ("temperature", "repetition_penalty", "top_p", "typical_p"):
        await router.refused("/generate", native(field, "1e-60"))
    assert (await router.post("/v1/chat/completions", raw=chat("temperature", "1e-60"))).status_code == 200
    assert not router.scheduler.last.sampling.do_sample


async def test_every_boolean_and_text_field_refuses_other_types(router: Router) -> None:
    for field in BOOLEANS:
        for literal in ("1", "0", '"true"', "[]", "{}"):
            await router.refused("/generate", native(field, literal))
    for field, literals in {
        "stop": ('"x"', "[1]", "[null]", "{}", "1"),
        "adapter_id": ("1", "[]", "true"),
        "grammar": ('"x"', "1", '{"type":"bnf","value":"x"}', "{}"),
    }.items():
        for literal in literals:
            await router.refused("/generate", native(field, literal))
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
            await router.refused("/v1/chat/completions", chat(field, literal))
    for field, literals in {
        "stop": ("1", "[1]", "{}"),
        "stream": ("1", '"true"'),
        "echo": ("1", '"true"'),
        "suffix": ("1", "[]"),
        "stream_options": ("true", '"x"', '{"include_usage":1}'),
        "logit_bias": ('"x"', '{"1":"x"}', "1"),
    }.items():
        for literal in literals:
            await router.refused("/v1/completions", completion(field, literal))


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
    body = await router.refused("/v1/chat/completions", raw)
    assert "messages" in body["error"]


@pytest.mark.parametrize(
    ("body_type", "body"),
    [
        (GenerateBody, {"inputs": "Hi", "parameters": {"stop": [1] * 99}}),
        (ChatBody, {"model": "m", "messages": [1] * 99}),
        (ChatBody, {"model": "m", "messages": [{"role": "user", "content": [1] * 99}]}),
        (ChatBody, {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stop": [1] * 99}),
        (ChatBody, {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [1] * 99}),
        (VertexBody, {"instances": [1] * 99}),
        (InferBody, {"id": "1", "inputs": [1] * 99, "outputs": []}),
    ],
)
def test_the_first_wrong_item_of_a_list_ends_its_check(body_type: type[Body], body: dict[str, Any]) -> None:
    """An error is made for each fault that is found, and a body has room for a million of them."""
    with pytest.raises(ValidationError) as caught:
        body_type.model_validate(body)
    assert caught.value.error_count() <= 2, "one, and one for the text that may stand in the list's place"
