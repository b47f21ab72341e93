"""Golden bodies of `/v1/chat/completions`, at once and streamed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from router_fakes import INFO, Router, data_of, failing, is_invalid, message_of, says
from tokenizers import Tokenizer

from router.errors import GenerationError
from router.events import Token

MakeRouter = Callable[..., Router]
PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Hello"}

IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER]} | fields


async def test_a_json_answer(router: Router) -> None:
    answer = await router.post(PATH, body(model="tgi"))
    assert answer.status_code == 200
    got = answer.json()
    assert list(got) == ["object", "id", "created", "model", "system_fingerprint", "choices", "usage"]
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", got.pop("id"))
    assert isinstance(got.pop("created"), int)
    length = router.scheduler.last.input_length
    assert got == {
        "object": "chat.completion",
        "model": "some/model",
        "system_fingerprint": "3.3.7-native",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": " one two", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": length,
            "completion_tokens": 2,
            "total_tokens": length + 2,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert router.scheduler.last.inputs == "<|user|>Hello\n<|assistant|>"
    assert answer.headers["x-compute-characters"] == str(len(router.scheduler.last.inputs))
    router.assert_idle()


async def test_the_bytes_of_a_stream(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says("A", "ß", "</s>", reason="eos_token", last_special=True))
    answer = await router.post(PATH, body(stream=True, model="dummy", stream_options={"include_usage": True}))
    assert answer.headers["content-type"] == "text/event-stream"
    events = data_of(answer.content)
    head = {key: events[0][key] for key in ("object", "id", "created", "model", "system_fingerprint")}
    assert head["object"] == "chat.completion.chunk" and head["model"] == "dummy"
    assert list(events[0]) == [*head, "choices", "usage"]
    assert all({key: event[key] for key in head} == head for event in events[:-1])
    choices = [event["choices"] for event in events[:-1]]
    assert choices == [
        [{"index": 0, "delta": {"role": "assistant", "content": "A"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "ß"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "stop"}],
        [],
    ]
    length = router.scheduler.last.input_length
    usage = {
        "prompt_tokens": length,
        "completion_tokens": 3,
        "total_tokens": length + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert [event["usage"] for event in events[:-1]] == [None, None, None, usage]
    assert events[-1] == "[DONE]"
    assert "ß".encode() in answer.content
    router.assert_idle()


async def test_without_include_usage_no_usage_chunk_comes(router: Router) -> None:
    for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        events = data_of((await router.post(PATH, body(stream=True, **options))).content)
        assert len(events) == 3 and events[-1] == "[DONE]" and events[1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("pieces", "stop", "said"),
    [
        (["Hel", "lo", " END"], "END", ["Hel", "lo", " "]),
        (["Hello E", "N", "D"], "END", ["Hello ", "", ""]),
        (["a", "E", "x", "E", "ND"], "END", ["a", "", "Ex", "", ""]),
        (["aENDb"], ["END"], ["a"]),
        (["x", "ab"], ["b", "ab"], ["x", ""]),
        (["aa", "ab"], ["aab"], ["", "a"]),
    ],
)
async def test_a_stop_is_dropped_and_never_streamed_in_part(
    make_router: MakeRouter, pieces: list[str], stop: Any, said: list[str]
) -> None:
    router = make_router(lambda request: says(*pieces, reason="stop_sequence"))
    events = data_of((await router.post(PATH, body(stream=True, stop=stop))).content)
    assert [event["choices"][0]["delta"]["content"] for event in events[:-1]] == said
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_what_was_held_back_comes_when_it_was_no_stop(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says("a", "E", "N", reason="length"))
    events = data_of((await router.post(PATH, body(stream=True, stop=["END", ""]))).content)
    assert [event["choices"][0]["delta"]["content"] for event in events[:-1]] == ["a", "", "EN"]


async def test_a_json_answer_lacks_the_stop(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says("Hello", "END", reason="stop_sequence"))
    choice = (await router.post(PATH, body(stop=["D", "END"]))).json()["choices"][0]
    assert choice["message"]["content"] == "Hello" and choice["finish_reason"] == "stop"


async def test_logprobs(make_router: MakeRouter) -> None:
    top = (Token(1, "x", -0.1), Token(2, "y", float("-inf")))
    router = make_router(lambda request: says("a", "b", top_tokens=top))
    tops = [{"token": "x", "logprob": -0.1, "bytes": [120]}, {"token": "y", "logprob": None, "bytes": [121]}]
    expected = [
        {"token": "a", "logprob": 0.0, "bytes": [97], "top_logprobs": tops},
        {"token": "b", "logprob": -0.25, "bytes": [98], "top_logprobs": tops},
    ]
    asked = body(logprobs=True, top_logprobs=2)
    choice = (await router.post(PATH, asked)).json()["choices"][0]
    assert choice["logprobs"] == {"content": expected, "refusal": None}
    assert router.scheduler.last.top_n_tokens == 2
    events = data_of((await router.post(PATH, asked | {"stream": True})).content)
    assert [event["choices"][0]["logprobs"]["content"] for event in events[:-1]] == [[one] for one in expected]


async def test_options_of_a_stream_need_one(router: Router) -> None:
    for path, asked in ((PATH, body()), ("/v1/completions", {"prompt": "x"})):
        answer = await router.post(path, asked | {"stream_options": {"include_usage": True}})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "stream_options"
        assert (await router.post(path, asked | {"stream_options": {"include_usage": False}})).status_code == 200


async def test_headers_count_all_choices(router: Router) -> None:
    headers = (await router.post(PATH, body(n=3))).headers
    assert headers["x-generated-tokens"] == "6" and headers["x-prompt-tokens"] == str(
        router.scheduler.last.input_length
    )
    assert "x-compute-time" in headers


async def test_several_choices(make_router: MakeRouter) -> None:
    def script(request: Any) -> Any:
        return says(f"s{request.sampling.seed}", "!", reason="eos_token")

    router = make_router(script)
    answer = (await router.post(PATH, body(n=3, seed=2**64 - 1))).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [f"s{2**64 - 1}!", "s0!", "s1!"]
    assert answer["usage"]["completion_tokens"] == 6
    router.assert_idle()
    events = data_of((await router.post(PATH, body(n=2, seed=5, stream=True))).content)
    by_choice: dict[int, list[Any]] = {0: [], 1: []}
    for event in events[:-1]:
        (choice,) = event["choices"]
        by_choice[choice["index"]].append(choice)
    for index, choices in by_choice.items():
        assert choices[0]["delta"] == {"role": "assistant", "content": f"s{5 + index}"}
        assert [choice["finish_reason"] for choice in choices] == [None, "stop"]
    assert events[-1] == "[DONE]"
    router.assert_idle()


async def test_one_failed_choice_ends_the_stream(make_router: MakeRouter) -> None:
    answers = [[None], failing("a", error=GenerationError("boom"))]
    router = make_router(lambda request: answers.pop(0))
    events = data_of((await router.post(PATH, body(n=2, stream=True))).content)
    assert events[-1] == "[DONE]" and events[-2]["error_type"] == "generation"
    router.assert_idle()


async def test_a_failure_inside_of_a_stream(make_router: MakeRouter) -> None:
    router = make_router(lambda request: failing("a", error=RuntimeError("boom")))
    events = data_of((await router.post(PATH, body(stream=True))).content)
    message = "Request failed during generation: boom"
    nested = {"message": message, "type": "server_error", "param": None, "code": None}
    assert events[1:] == [{"error": nested, "error_type": "generation"}, "[DONE]"]


async def test_openai_parameters_reach_the_scheduler(router: Router) -> None:
    asked = body(
        temperature=0.7, top_p=1, top_k=5, typical_p=0.5, min_p=0.1, min_tokens=2, frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.1, logit_bias={"5": -100, "6": 2.5}, seed=4, stop="x", max_tokens=3,
        max_completion_tokens=7, ignore_eos=True, user="me", store=False, metadata={}, parallel_tool_calls=True,
    )  # fmt: skip
    assert (await router.post(PATH, asked)).status_code == 200
    request = router.scheduler.last
    sampling = request.sampling
    assert sampling.do_sample and sampling.temperature == 0.7 and sampling.top_p == 1.0 and sampling.top_k == 5
    assert (
        sampling.typical_p == 0.5
        and sampling.min_p == 0.1
        and sampling.min_tokens == 2
        and sampling.repetition_penalty == 1.1
    )
    assert sampling.absolute_frequency_penalty == 0.5 and sampling.frequency_penalty == 0
    assert sampling.presence_penalty == -0.5 and sampling.logit_bias == ((5, -100.0), (6, 2.5))
    assert request.stopping.max_new_tokens == 7 and request.stopping.ignore_eos_token
    assert request.stopping.stop_sequences == ("x",)


async def test_only_temperature_zero_is_greedy(router: Router) -> None:
    for temperature, samples in ((0, False), (0.0, False), (1.0, True), (None, True)):
        await router.post(PATH, body(temperature=temperature))
        assert router.scheduler.last.sampling.do_sample is samples


async def test_temperature_zero_is_greedy_whatever_else_is_given(router: Router) -> None:
    filters = {"top_p": 0.5, "top_k": 9, "typical_p": 0.5, "min_p": 0.1}
    for path, asked in ((PATH, body()), ("/v1/completions", {"prompt": "x"})):
        assert (await router.post(path, asked | filters | {"temperature": 0})).status_code == 200
        sampling = router.scheduler.last.sampling
        assert (sampling.do_sample, sampling.temperature, sampling.top_k) == (False, 1.0, 0)
        assert (sampling.top_p, sampling.typical_p, sampling.min_p) == (1.0, 1.0, 0.0)
        assert is_invalid(await router.post(path, asked | filters | {"temperature": 0, "top_p": 2}))
        await router.post(path, asked | filters)
        assert router.scheduler.last.sampling.top_p == 0.5


@pytest.mark.parametrize(
    ("fields", "error_type", "word"),
    [
        ({"response_format": {"type": "json_schema"}}, "validation", "grammar"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "validation", "`json_schema`"),
        ({"best_of": 3}, "validation", "`best_of`"),
        ({"add_special_tokens": True}, "validation", "`add_special_tokens`"),
        ({"response_format": {"type": "regex", "value": "a(?=b)"}}, "validation", "grammar"),
        ({"tool_choice": "required"}, "tool_error", "tool_choice"),
        ({"messages": IMAGE}, "validation", "image_url"),
        ({"n": 0}, "validation", "`n`"),
        ({"n": 5}, "validation", "`n`"),
        ({"logprobs": True, "top_logprobs": 21}, "validation", "`top_logprobs` must be >= 0 and <= 20. Given: 21"),
        ({"top_logprobs": 2}, "validation", "`top_logprobs` needs `logprobs`"),
        ({"top_p": -0.1}, "validation", "`top_p` must be in [0, 1]"),
        ({"presence_penalty": 2.5}, "validation", "presence_penalty"),
        ({"frequency_penalty": -2.5}, "validation", "frequency_penalty"),
        ({"logit_bias": {"100000": 1}}, "validation", "logit_bias"),
        ({"logit_bias": {"x": 1}}, "validation", "logit_bias"),
        ({"logit_bias": {"1": 101}}, "validation", "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "validation", "logit_bias"),
        ({"logit_bias": [1.0]}, "validation", "logit_bias"),
        ({"stop": ["x"] * 65}, "validation", "`stop` supports up to 64"),
        ({"max_tokens": 0}, "validation", "`max_tokens` must be > 0, or -1"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refused_before_anything_is_sent(
    router: Router, fields: dict[str, Any], error_type: str, word: str, stream: bool
) -> None:
    answer = await router.post(PATH, body(stream=stream, **fields))
    assert is_invalid(answer)
    assert answer.json()["error_type"] == error_type and word in message_of(answer)
    router.assert_idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "text"}, "tools": []},
        {"best_of": 1, "add_special_tokens": False},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tools": None, "tool_choice": None, "stop": None, "logit_bias": None, "n": None, "logprobs": None},
        {"logit_bias": []},
        {"n": 1},
    ],
)
async def test_neutral_values_are_served(router: Router, fields: dict[str, Any]) -> None:
    assert (await router.post(PATH, body(**fields))).status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": "a", "name": None, "tool_calls": None}],
        [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "4"},
        ],
    ],
)
async def test_message_forms(router: Router, messages: list[Any]) -> None:
    assert (await router.post(PATH, {"messages": messages})).status_code == 200


async def test_no_template_and_failing_templates(make_router: MakeRouter) -> None:
    answer = await make_router(templates={}).post(PATH, body())
    assert is_invalid(answer)
    said = message_of(answer)
    assert said.startswith("Template error: template not found: ") and "/v1/completions" in said
    router = make_router(templates={"default": "{{ raise_exception('no ' ~ messages[0].role) }}"})
    answer = await router.post(PATH, body(stream=True))
    assert is_invalid(answer) and answer.json()["error_type"] == "template_error"
    assert "no user" in message_of(answer)
    assert b'tgi_request_failure{err="template"} 1' in router.metrics.render()
    router.assert_idle()


async def test_an_earlier_refusal_is_read_as_text(make_router: MakeRouter) -> None:
    router = make_router(templates={"default": "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"})
    parts = [{"type": "refusal", "refusal": "No."}]
    for refused in ({"content": parts}, {"content": None, "refusal": "No."}, {"content": "No.", "refusal": "other"}):
        turns = [{"role": "assistant", **refused}, {"role": "user", "content": "Why?"}]
        answer = await router.post(PATH, {"messages": turns})
        assert answer.status_code == 200, answer.text
        assert router.scheduler.last.inputs == "assistant: No.|user: Why?|"


CALLS = [
    USER,
    {"role": "assistant", "content": "I look", "reasoning": "hm"},
    {"role": "tool", "content": "it rains", "tool_call_id": "c1"},
]
WITH_THOUGHTS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
AT_THE_END = "{{ messages|length }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_FEWER = "{% if messages|length < 3 %}{{ raise_exception('no') }}{% endif %}" + WITH_THOUGHTS


@pytest.mark.parametrize(
    ("template", "messages", "behind"),
    [
        (WITH_THOUGHTS, [USER], ""),
        (WITH_THOUGHTS, CALLS, "I look[tool]it rains[assistant]"),
        (WITH_THOUGHTS, [*CALLS, USER], ""),
        (WITH_THOUGHTS, CALLS[1:], None),  # no user message
        (AT_THE_END, CALLS, None),  # earlier turns are rendered otherwise
        (NO_FEWER, CALLS, None),
    ],
)
async def test_states_are_saved_in_front_of_the_answers_to_the_last_user_message(
    make_router: MakeRouter, tokenizer: Tokenizer, template: str, messages: list[dict[str, Any]], behind: str | None
) -> None:
    router = make_router(info=replace(INFO, state_slots=4), templates={"default": template})
    assert (await router.post(PATH, body(messages=messages))).status_code == 200
    request = router.scheduler.last
    if behind is None:
        assert request.answer_start == 0
    else:
        assert request.inputs.endswith(behind)
        before = tokenizer.encode(request.inputs.removesuffix(behind), add_special_tokens=False)
        assert request.answer_start == len(before.ids)
