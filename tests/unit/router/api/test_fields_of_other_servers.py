"""Fields of vLLM, SGLang and OpenRouter on OpenAI's routes: each changes the answer as it says, or is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import INFO, Router, data_of, is_invalid, message_of, says
from test_native_calls import ANSWER, make_native, model_format, with_tokens
from tool_chats import PATH

from router.api.chat.prompt import default_variables
from router.errors import StartupError
from router.events import Event, Finished, Predicted
from router.request import ValidRequest

MakeRouter = Callable[..., Router]
__all__ = ["make_native"]

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
TEXT = "/v1/completions"
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<A>{% endif %}"
)


def stopped(router: Router) -> None:
    router.scheduler.script = lambda _: says("One", " two", " END", reason="stop_sequence", text="One two END")


@pytest.mark.parametrize("path", [PATH, TEXT])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_stop_text_is_kept_if_the_client_says_so(
    make_router: MakeRouter, path: str, keeps: bool, stream: bool
) -> None:
    router = make_router()
    stopped(router)
    asked = {"stop": ["END"], "include_stop_str_in_output": keeps, "stream": stream}
    answer = await router.post(path, (HELLO if path == PATH else {"prompt": "Hello"}) | asked)
    events = [one for one in data_of(answer.content) if one != "[DONE]"] if stream else [answer.json()]
    choices = [event["choices"][0] for event in events]
    texts = [one["text"] if path == TEXT else one.get("delta", one.get("message"))["content"] for one in choices]
    assert "".join(texts) == ("One two END" if keeps else "One two ")
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", [PATH, TEXT])
async def test_usage_so_far_in_each_chunk(make_router: MakeRouter, path: str) -> None:
    router = make_router()
    asked = {"stream": True, "stream_options": {"continuous_usage_stats": True, "include_usage": True}}
    answer = await router.post(path, (HELLO if path == PATH else {"prompt": "Hello"}) | asked)
    *chunks, last = [one["usage"] for one in data_of(answer.content) if one != "[DONE]"]
    assert [used["completion_tokens"] for used in chunks] == list(range(1, len(chunks) + 1))
    assert all(used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"] for used in chunks)
    assert last["completion_tokens"] == len(chunks) and last["prompt_tokens_details"] == {"cached_tokens": 0}
    assert not any("prompt_tokens_details" in used for used in chunks)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [PATH, TEXT])
async def test_usage_says_what_the_prefix_cache_had(make_router: MakeRouter, path: str, stream: bool) -> None:
    router = make_router()

    def script(_: Any) -> Any:
        *events, last = says("One", " two")
        return [*events, dataclasses.replace(last, cached_tokens=3)]

    router.scheduler.script = script
    asked = ({"stream": True, "stream_options": {"include_usage": True}} if stream else {}) | {"n": 2}
    answer = await router.post(path, (HELLO if path == PATH else {"prompt": "Hello"}) | asked)
    whole = data_of(answer.content)[-2] if stream else answer.json()
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


LAST = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes, "}]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "<user>Hi</><assistant>Yes,"),
        ({"continue_final_message": True}, "<user>Hi</><assistant>Yes,"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<user>Hi</><assistant>Yes,"),
        ({"add_generation_prompt": True}, "<user>Hi</><assistant>Yes, </><A>"),
        ({"continue_final_message": False}, "<user>Hi</><assistant>Yes, </><A>"),
        ({"add_generation_prompt": False}, "<user>Hi</><assistant>Yes, </>"),
    ],
)
async def test_how_the_prompt_ends(make_router: MakeRouter, fields: dict[str, Any], prompt: str) -> None:
    router = make_router(templates={"default": TURNS})
    answer = await router.post(PATH, {"messages": LAST} | fields)
    assert answer.status_code == 200, answer.text
    assert router.scheduler.last.inputs == prompt


@pytest.mark.parametrize(
    ("fields", "says_so"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "exclude each other"),
        ({"continue_final_message": True}, "`continue_final_message` needs a last message of the assistant"),
        ({"documents": [{"text": "x"}]}, "does not read `documents`"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "`reasoning_effort` is given twice"),
        ({"thinking_token_budget": 1, "reasoning": {"max_tokens": 2}}, "`thinking_token_budget` is given twice"),
    ],
)
async def test_what_makes_no_sense_is_refused(make_router: MakeRouter, fields: dict[str, Any], says_so: str) -> None:
    answer = await make_router(templates={"default": TURNS}).post(PATH, HELLO | fields)
    assert is_invalid(answer) and says_so in message_of(answer), answer.text


async def test_documents_go_to_a_template_that_reads_them(make_router: MakeRouter) -> None:
    router = make_router(templates={"default": "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}"})
    await router.post(PATH, HELLO | {"documents": [{"text": "a"}, {"text": "b"}]})
    assert router.scheduler.last.inputs == "[a][b]"


SWITCHES = "{{ enable_thinking }} {{ reasoning_effort }} {{ more }}"


@pytest.mark.parametrize(
    ("fields", "defaults", "prompt"),
    [
        ({"reasoning": {"effort": "low"}}, None, " low "),
        ({"reasoning": {"enabled": True}}, None, "True  "),
        ({"reasoning": {"enabled": False}}, None, "False  "),
        ({"reasoning": {"effort": "none"}}, None, "False none "),
        ({}, '{"enable_thinking": false, "more": 1}', "False  1"),
        ({"chat_template_kwargs": {"more": 2}}, '{"enable_thinking": false, "more": 1}', "False  2"),
        ({"reasoning_effort": "none"}, '{"enable_thinking": true}', "False none "),
        ({}, '{"reasoning_effort": "none"}', "False none "),
    ],
)
async def test_options_of_reasoning(
    make_router: MakeRouter, fields: dict[str, Any], defaults: str | None, prompt: str
) -> None:
    router = make_router(templates={"default": SWITCHES}, template_defaults=default_variables(defaults))
    await router.post(PATH, HELLO | fields)
    assert router.scheduler.last.inputs == prompt


@pytest.mark.parametrize("text", ["{", "[]", '{"messages": 1}'])
def test_default_variables_that_make_no_sense(text: str) -> None:
    with pytest.raises(StartupError, match="--default-chat-template-kwargs"):
        default_variables(text)


async def test_a_budget_of_minus_one_is_no_bound(make_native: MakeRouter) -> None:
    router = make_native(["Fine", "</s>"], ["Fine", "</s>"], model_format=with_tokens())
    for fields in ({"thinking_token_budget": -1}, {"thinking_budget_tokens": -1}):
        assert (await router.post(PATH, HELLO | fields)).status_code == 200
        assert router.scheduler.last.sampling.grammar == ""


@pytest.mark.parametrize("fields", [{"thinking_budget_tokens": 5}, {"reasoning": {"max_tokens": 5}}])
async def test_a_budget_has_three_names(make_native: MakeRouter, fields: dict[str, Any]) -> None:
    router = make_native(["{}", "</s>"], model_format=with_tokens())
    assert (await router.post(PATH, HELLO | fields)).status_code == 200
    assert "thought{0,5} <[10]>" in router.scheduler.last.sampling.grammar


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
@pytest.mark.parametrize("stream", [True, False])
async def test_reasoning_is_left_out_and_counted(make_native: MakeRouter, fields: dict[str, Any], stream: bool) -> None:
    router = make_native(ANSWER, model_format=model_format(style="think"))
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await router.post(PATH, HELLO | fields | options)
    assert "Let" not in answer.text and "reasoning_content" not in answer.text and "One" in answer.text
    whole = data_of(answer.content)[-2] if stream else answer.json()
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


@pytest.mark.parametrize(("path", "body"), [(PATH, HELLO), (TEXT, {"prompt": "Hello"})])
async def test_a_prediction_goes_to_shards_that_draft(make_router: MakeRouter, path: str, body: dict[str, Any]) -> None:
    router = make_router()
    for content in ("One two", [{"type": "text", "text": "One "}, {"type": "text", "text": "two"}]):
        answer = await router.post(path, body | {"prediction": {"type": "content", "content": content}})
        assert answer.status_code == 200, answer.text
        ids = router.scheduler.last.prediction_ids
        assert list(ids) == await router.tokenizer.encode("One two", add_special_tokens=False, truncate=None)
    await router.post(path, body | {"prediction": None})
    assert router.scheduler.last.prediction_ids == ()
    answer = await router.post(path, body | {"prediction": {"type": "content", "content": "a " * 9000}})
    assert is_invalid(answer) and "`prediction` must have at most 2048 tokens" in answer.text
    answer = await router.post(path, body | {"prediction": {"type": "text", "content": "a"}})
    assert is_invalid(answer)
    plain = make_router(info=dataclasses.replace(INFO, speculate=0))
    answer = await plain.post(path, body | {"prediction": {"type": "content", "content": "One"}})
    assert is_invalid(answer) and "start it with `--speculate`" in answer.text


@pytest.mark.parametrize(("path", "body"), [(PATH, HELLO), (TEXT, {"prompt": "Hello"})])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("number", [1, 2])
async def test_usage_says_what_became_of_a_prediction(
    make_router: MakeRouter, path: str, body: dict[str, Any], stream: bool, number: int
) -> None:
    router = make_router()

    def script(request: ValidRequest) -> list[Event]:
        *events, last = says("One", " two")
        assert isinstance(last, Finished)
        return [*events, dataclasses.replace(last, predicted=Predicted(2, 3) if request.prediction_ids else None)]

    router.scheduler.script = script
    asked = body | {"n": number, "stream": stream}

    async def details(**more: Any) -> Any:
        answer = await router.post(path, asked | more)
        assert answer.status_code == 200, answer.text
        found = [one for one in data_of(answer.content) if one != "[DONE]"][-1] if stream else answer.json()
        return found["usage"].get("completion_tokens_details")

    options = {"stream_options": {"include_usage": True}} if stream else {}
    expected = {"accepted_prediction_tokens": 2 * number, "rejected_prediction_tokens": 3 * number}
    foretold = {"prediction": {"type": "content", "content": "One"}}
    assert await details(**options, **foretold) == expected
    assert await details(**options) is None
    if stream and path == TEXT and number == 1:  # in the last chunk, as TGI's clients find it
        assert await details(**foretold) == expected
