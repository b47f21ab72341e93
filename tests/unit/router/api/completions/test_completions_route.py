"""Golden bodies of `/v1/completions`, at once and streamed; what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import openai
import pytest
from router_fakes import Router, data_of, failing, is_invalid, message_of, says

from router.errors import GenerationError

MakeRouter = Callable[..., Router]

PATH = "/v1/completions"


def body(prompt: Any = "Hello", **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt} | fields


async def test_a_json_answer(router: Router) -> None:
    answer = await router.post(PATH, body(model="other"))
    assert answer.status_code == 200
    got = answer.json()
    assert list(got) == ["object", "id", "created", "model", "system_fingerprint", "choices", "usage"]
    assert re.fullmatch("cmpl-[0-9a-f]{32}", got.pop("id"))
    assert isinstance(got.pop("created"), int)
    length = router.scheduler.last.input_length
    assert got == {
        "object": "text_completion",
        "model": "some/model",
        "system_fingerprint": "3.3.7-native",
        "choices": [{"index": 0, "text": " one two", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": length,
            "completion_tokens": 2,
            "total_tokens": length + 2,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    request = router.scheduler.last
    assert request.inputs == "Hello"
    assert not request.decoder_input_details, "TGI forces it on and loses its prefix cache by that"
    assert answer.headers["x-compute-characters"] == "5" and answer.headers["x-generated-tokens"] == "2"
    assert "x-compute-time" not in answer.headers
    router.assert_idle()


async def test_several_prompts_are_sorted_and_summed(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says(*["!"] * len(request.inputs), reason="eos_token"))
    answer = await router.post(PATH, body(["aaa", "b", "cc"]))
    got = answer.json()
    assert [(choice["index"], choice["text"]) for choice in got["choices"]] == [(0, "!!!"), (1, "!"), (2, "!!")]
    assert {choice["finish_reason"] for choice in got["choices"]} == {"stop"}
    lengths = sum(request.input_length for request in router.scheduler.submitted)
    assert got["usage"] == {
        "prompt_tokens": lengths,
        "completion_tokens": 6,
        "total_tokens": lengths + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer.headers["x-compute-characters"] == "6" and answer.headers["x-generated-tokens"] == "6"
    assert answer.headers["x-prompt-tokens"] == str(lengths)
    router.assert_idle()


async def test_the_bytes_of_a_stream(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says("A", "ß", "</s>", reason="eos_token", last_special=True))
    answer = await router.post(PATH, body(stream=True))
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-compute-characters"] == "5"
    events = data_of(answer.content)
    assert events.pop() == "[DONE]"
    assert [list(event) for event in events] == [
        ["object", "id", "created", "choices", "model", "system_fingerprint"],
        ["object", "id", "created", "choices", "model", "system_fingerprint"],
        ["object", "id", "created", "model", "system_fingerprint", "choices", "usage"],
    ]
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert [event["choices"] for event in events] == [
        [{"index": 0, "text": "A", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "ß", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}],
    ]
    length = router.scheduler.last.input_length
    assert events[-1]["usage"] == {
        "prompt_tokens": length,
        "completion_tokens": 3,
        "total_tokens": length + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    router.assert_idle()


async def test_include_usage_gives_one_chunk_without_choices(router: Router) -> None:
    options = {"include_usage": True}
    events = data_of((await router.post(PATH, body(["a", "bb"], stream=True, stream_options=options))).content)
    assert events.pop() == "[DONE]"
    length = sum(request.input_length for request in router.scheduler.submitted)
    last = events.pop()
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": length,
        "completion_tokens": 4,
        "total_tokens": length + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert [event["usage"] for event in events] == [None] * 4


async def test_a_stream_that_wants_no_usage_has_none(router: Router) -> None:
    for options, has_usage in (({}, True), ({"stream_options": {"include_usage": False}}, False)):
        events = data_of((await router.post(PATH, body("a", stream=True, **options))).content)
        assert [bool(event.get("usage")) for event in events[:-1]] == [False, has_usage]


async def test_a_stream_of_several_prompts_and_choices(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says(f"{request.inputs}{request.sampling.seed}", "!", reason="eos_token"))
    events = data_of((await router.post(PATH, body(["a", "b"], n=2, seed=7, stream=True))).content)
    assert events.pop() == "[DONE]"
    by_choice: dict[int, list[Any]] = {}
    for event in events:
        assert "usage" not in event
        (choice,) = event["choices"]
        by_choice.setdefault(choice["index"], []).append((choice["text"], choice["finish_reason"]))
    assert by_choice == {
        index: [(text, None), ("!", "stop")] for index, text in enumerate(["a7", "a8", "b7", "b8"])
    }  # fmt: skip
    router.assert_idle()


async def test_one_failed_prompt_of_a_stream_leaves_the_others(make_router: MakeRouter) -> None:
    answers = [failing("x", error=GenerationError("boom")), says("a", "b", "c", "d")]
    router = make_router(lambda request: answers.pop(0))
    asked = body(["p", "q"], stream=True, stream_options={"include_usage": True})
    events = data_of((await router.post(PATH, asked)).content)
    assert events.pop() == "[DONE]"
    assert events.pop()["usage"]["completion_tokens"] == 4
    message = "Request failed during generation: boom"
    nested = {"message": message, "type": "server_error", "param": None, "code": None}
    assert {"error": nested, "error_type": "generation"} in events
    said = [event["choices"][0] for event in events if "choices" in event]
    assert "".join(choice["text"] for choice in said if choice["index"] == 1) == "abcd"
    router.assert_idle()


async def test_one_failed_prompt_fails_a_json_answer(make_router: MakeRouter) -> None:
    answers = [[None], failing(error=GenerationError("boom"))]
    router = make_router(lambda request: answers.pop(0))
    answer = await router.post(PATH, body(["p", "q"]))
    assert answer.status_code == 500 and answer.json()["error_type"] == "generation"
    router.assert_idle()


async def test_an_error_nobody_foresaw_ends_a_stream_of_several(make_router: MakeRouter) -> None:
    router = make_router(lambda request: [])  # the fake runs out of events with an IndexError
    nested = {"message": "internal error", "type": "server_error", "param": None, "code": None}
    error = {"error": nested, "error_type": "internal"}
    for prompt, number in (("a", 1), (["a", "b"], 2)):
        events = data_of((await router.post(PATH, body(prompt, stream=True))).content)
        assert events == [error] * number + ["[DONE]"]
    router.assert_idle()


async def test_a_fault_of_ours_ends_a_stream_with_an_error(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.api.completions.answer.ChoiceStream.chunk", lambda stream, event: 1 / 0)
    first, *rest = data_of((await router.post(PATH, body(["a", "b"], stream=True))).content)
    assert first["error"]["message"] == "internal error" and rest == ["[DONE]"]
    router.assert_idle()


async def test_parameters_reach_the_scheduler(router: Router) -> None:
    asked = body(
        temperature=0.7, top_p=1, top_k=5, typical_p=0.5, min_p=0.1, min_tokens=2, frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.1, logit_bias={"5": -100, "6": 2.5}, seed=4, stop="x", max_tokens=3, ignore_eos=True,
        user="me",
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
    assert sampling.absolute_frequency_penalty == 0.5 and sampling.frequency_penalty == 0 and sampling.seed == 4
    assert sampling.presence_penalty == -0.5 and sampling.logit_bias == ((5, -100.0), (6, 2.5))
    assert request.stopping.max_new_tokens == 3 and request.stopping.ignore_eos_token
    assert request.stopping.stop_sequences == ("x",)
    for temperature, samples in ((0, False), (0.0, False), (1.0, True), (None, True)):
        await router.post(PATH, body(temperature=temperature))
        assert router.scheduler.last.sampling.do_sample is samples


@pytest.mark.parametrize(
    ("fields", "error_type", "word"),
    [
        ({"prompt": ["x"] * 5}, "batch size exceeded", "up to 4 prompts. Given: 5"),
        ({"prompt": ["x"] * 3, "n": 2}, "batch size exceeded", "3 prompts with 2"),
        ({"suffix": ""}, "suffix not supported", "suffix"),
        ({"suffix": "x"}, "suffix not supported", "suffix"),
        ({"n": 0}, "validation", "`n`"),
        ({"n": 5}, "validation", "`n`"),
        ({"best_of": 0}, "validation", "`best_of`"),
        ({"n": 2, "best_of": 1}, "validation", "`best_of`"),
        ({"best_of": 3}, "validation", "`best_of`"),
        ({"best_of": 2, "temperature": 0}, "validation", "sampling"),
        ({"logprobs": 21}, "validation", "`logprobs` must be >= 0 and <= 20. Given: 21"),
        ({"max_tokens": 0}, "validation", "`max_tokens` must be > 0, or -1 for as many as fit; 0 needs `echo`"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "validation", "`min_tokens` must be <= `max_tokens`"),
        ({"max_tokens": 0, "echo": True, "best_of": 2}, "validation", "`best_of` > `n` needs tokens"),
        ({"top_p": -1}, "validation", "top_p"),
        ({"temperature": -1}, "validation", "temperature"),
        ({"presence_penalty": 2.5}, "validation", "presence_penalty"),
        ({"frequency_penalty": -2.5}, "validation", "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "validation", "logit_bias"),
        ({"stop": ["x"] * 65}, "validation", "stop"),
        ({"prompt": ""}, "validation", "cannot be empty"),
        ({"prompt": ["x", ""]}, "validation", "cannot be empty"),
        ({"prompt": "ab " * 3000}, "validation", "`prompt` has "),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refused_before_anything_is_sent(
    router: Router, fields: dict[str, Any], error_type: str, word: str, stream: bool
) -> None:
    answer = await router.post(PATH, body(stream=stream) | fields)
    assert is_invalid(answer)
    said = message_of(answer)
    assert answer.json()["error_type"] == error_type
    assert word in said or (stream and "streaming" in said)
    assert b'tgi_request_failure{err="validation"} 1' in router.metrics.render()
    router.assert_idle()


async def test_no_token_but_the_prompt(make_router: MakeRouter) -> None:
    """How likelihoods are asked for: the one token of the prompt's step is nowhere in the answer."""
    router = make_router(lambda request: says("STOP", reason="stop_sequence"))
    asked = body(["Hello", "Good day"], max_tokens=0, echo=True, n=2, stop="STOP", include_stop_str_in_output=True)
    answer = await router.post(PATH, asked)
    assert answer.status_code == 200, answer.text
    assert [request.stopping.max_new_tokens for request in router.scheduler.submitted] == [1] * 4
    choices = answer.json()["choices"]
    assert [one["text"] for one in choices] == ["Hello", "Hello", "Good day", "Good day"]
    assert {one["finish_reason"] for one in choices} == {"length"}
    assert answer.json()["usage"]["completion_tokens"] == 0 and answer.headers["x-generated-tokens"] == "0"
    streamed = await router.post(PATH, body(max_tokens=0, echo=True, stream=True, stop="STOP"))
    events = data_of(streamed.content)
    (choice,) = events[0]["choices"]
    assert events[1:] == ["[DONE]"] and choice["text"] == "Hello" and choice["finish_reason"] == "length"
    assert events[0]["usage"]["completion_tokens"] == 0
    router.assert_idle()


async def test_best_of_is_not_streamed(router: Router) -> None:
    answer = await router.post(PATH, body(best_of=2, stream=True))
    assert is_invalid(answer) and "streaming" in message_of(answer)


@pytest.mark.parametrize(
    "prompt", ["[]", "null", "1", "{}", "[1.5]", "[-1]", "[true]", "[4294967296]", "[[]]", '["a",1]', '[[1],"a"]',
               '[["a"]]', "[null]", "[[[1]]]", "[1,[2]]", "[[1],[]]"]
)  # fmt: skip
async def test_malformed_prompts(router: Router, prompt: str) -> None:
    answer = await router.post(PATH, raw=f'{{"prompt":{prompt}}}'.encode())
    assert is_invalid(answer) and answer.json()["error_type"] == "validation"
    assert "prompt" in message_of(answer) and len(message_of(answer)) < 300


async def test_a_million_ids_are_refused_in_time(make_router: MakeRouter) -> None:
    router = make_router()
    answer = await router.post(PATH, body([1] * 600_000))
    assert is_invalid(answer)
    answer = await router.post(PATH, raw=b'{"prompt":[' + b"1," * 600_000 + b'"x"]}')
    assert is_invalid(answer)


async def test_the_openai_client(make_router: MakeRouter) -> None:
    answers = {"": says(" one", " two"), "!": failing(" one", error=GenerationError("boom"))}
    router = make_router(lambda request: answers["!" if "!" in request.inputs else ""])
    async with router.listening() as port:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0)
        async with client:
            whole = await client.completions.create(model="tgi", prompt=["a", "b"], logprobs=1, max_tokens=2, n=2)
            assert [choice.text for choice in whole.choices] == [" one two"] * 4
            assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.tokens == [" one", " two"]
            stream = await client.completions.create(
                model="tgi", prompt="a", stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == " one two"
            assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2
            with pytest.raises(openai.APIError, match="boom"):
                async for _ in await client.completions.create(model="tgi", prompt="!", stream=True):
                    pass
            with pytest.raises(openai.BadRequestError, match="suffix"):
                await client.completions.create(model="tgi", prompt="a", suffix="b")
    router.assert_idle()
