"""A chat that may call a tool or answer in words: decision and answer, at once and streamed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import Router, data_of, failing, is_invalid, says
from tool_chats import CALL, NO_TOOL, PATH, body, deltas, script

from router.answers.tgi_form.two_passes import permits_of_one_pass
from router.errors import GenerationError
from router.events import Event
from router.generation.permits import HeldPermits, PermitPool
from router.generation.timings import Timings
from router.request import ValidRequest

MakeRouter = Callable[..., Router]


async def test_words_instead_of_a_call(make_router: MakeRouter) -> None:
    router = make_router(script(NO_TOOL, ["Hi", " there", "</s>"]))
    answer = await router.post(PATH, body(logprobs=True, seed=4))
    (got,) = answer.json()["choices"]
    assert (
        got["message"] == {"role": "assistant", "content": "Hi there", "refusal": None}
        and got["finish_reason"] == "stop"
    )
    assert [token["token"] for token in got["logprobs"]["content"]] == ["Hi", " there", "</s>"]
    first, second = router.scheduler.submitted
    assert "get_weather" in first.inputs and "get_weather" not in second.inputs
    assert first.sampling.grammar_kind == "json" and second.sampling.grammar_kind == "none"
    assert first.sampling.seed == second.sampling.seed == 4
    length = second.input_length
    assert answer.json()["usage"] == {
        "prompt_tokens": length,
        "completion_tokens": 3,
        "total_tokens": length + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer.headers["x-prompt-tokens"] == str(length)
    assert router.metrics.render().count(b"\ntgi_request_count 1\n") == 1
    router.assert_idle()


async def test_words_in_a_stream(make_router: MakeRouter) -> None:
    router = make_router(script(NO_TOOL, ["Hi", " there", "</s>"]))
    asked = body(stream=True, logprobs=True, stream_options={"include_usage": True})
    events = data_of((await router.post(PATH, asked)).content)
    assert deltas(events) == [{"role": "assistant", "content": "Hi"}, {"content": " there"}, {"content": ""}]
    assert events[2]["choices"][0]["finish_reason"] == "stop"
    assert [event["choices"][0]["logprobs"]["content"][0]["token"] for event in events[:3]] == ["Hi", " there", "</s>"]
    assert events[3]["usage"]["completion_tokens"] == 3
    router.assert_idle()


@pytest.mark.parametrize("pieces", [NO_TOOL, CALL])
@pytest.mark.parametrize("path", [PATH, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_both_passes_are_one_request(make_router: MakeRouter, pieces: list[str], path: str, stream: bool) -> None:
    """It counts once, and its prompt is that of the pass that the client gets, in every form of every route."""
    router = make_router(script(pieces, ["Hi", " there", "</s>"]))
    asked = body(max_tokens=50)
    tools = asked["tools"]
    if path == "/v1/responses":
        asked = {"input": "Hello", "tools": [{"type": "function", **tool["function"]} for tool in tools]}
    elif path == "/v1/messages":
        shown = [
            {"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters") or {"type": "object"}}
            for tool in tools
        ]
        asked = {"model": "m", "max_tokens": 50, "messages": asked["messages"], "tools": shown}
    elif stream:
        asked["stream_options"] = {"include_usage": True}
    answer = await router.post(path, asked | {"stream": stream})
    assert answer.status_code == 200, answer.text
    length = router.scheduler.submitted[-1].input_length
    counts = re.findall(r'"(?:prompt|input)_tokens":(\d+)', answer.text)
    assert counts and set(counts) == {str(length)}
    assert len(router.scheduler.submitted) == (2 if pieces is NO_TOOL else 1)
    text = router.metrics.render().decode()
    for name in ("request_duration", "request_input_length", "request_time_to_first_token_duration"):
        assert f"\ntgi_{name}_count 1\n" in text, name
    assert "\ntgi_request_success 1\n" in text
    assert f"\ntgi_request_generated_tokens_sum {3 if pieces is NO_TOOL else len(CALL)}" in text
    router.assert_idle()


def test_what_a_decision_took_is_part_of_the_request() -> None:
    decision = Timings(total=1.0, validation=0.25, queue=0.25, inference=0.5, num_tokens=3)
    answer = Timings(total=2.0, validation=1.25, queue=0.25, inference=0.5, num_tokens=4)
    assert answer.after(None) is answer
    whole = answer.after(decision)
    assert (whole.validation, whole.queue, whole.inference) == (0.5, 0.5, 1.0)
    assert whole.validation + whole.queue + whole.inference == whole.total


async def test_one_permit_lasts_for_both_passes(make_router: MakeRouter) -> None:
    router = make_router(lambda request: [None])
    permit_pool = router.inference.permit_pool
    taken: list[int] = []
    answers = [list(NO_TOOL), ["Hi", "</s>"]]

    def watched(request: ValidRequest) -> list[Event]:
        taken.append(permit_pool.num_taken)
        return says(*answers.pop(0), reason="eos_token", last_special=True)

    router.scheduler.script = watched
    permit_pool.acquire(3)  # all but one
    assert (await router.post(PATH, body())).status_code == 200
    assert taken == [3 + 1, 3 + 1] and permit_pool.num_taken == 3
    permit_pool.give_back(3)


def test_a_pass_belongs_to_the_request_that_it_is_for() -> None:
    permit_pool = PermitPool(1)
    assert permit_pool.acquire(1)
    span: Any = object()
    permits = HeldPermits(permit_pool, 1, "id", span)
    one = permits_of_one_pass(permits)
    assert (one.request_id, one.request_span, one.arrived_at) == ("id", span, permits.arrived_at)
    one.hand_over().give_back(1)
    assert permit_pool.num_taken == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decision_that_did_not_fit_is_for_words(make_router: MakeRouter, stream: bool) -> None:
    answers = [says('{"func', "tion", reason="length"), says("Hi", "!", reason="length")]
    router = make_router(lambda request: answers.pop(0))
    answer = await router.post(PATH, body(max_tokens=2, stream=stream))
    if stream:
        events = data_of(answer.content)
        assert [delta["content"] for delta in deltas(events)] == ["Hi", "!"]
        assert events[-2]["choices"][0]["finish_reason"] == "length"
    else:
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"] == "Hi!" and choice["finish_reason"] == "length"
    router.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_decide_each_for_itself(make_router: MakeRouter, stream: bool) -> None:
    def play(request: ValidRequest) -> list[Event]:
        if request.sampling.grammar_kind == "none":
            return says("w", str(request.sampling.seed), "</s>", reason="eos_token", last_special=True)
        pieces = CALL if request.sampling.seed == 6 else NO_TOOL
        return says(*pieces, reason="eos_token", last_special=True)

    router = make_router(play)
    answer = await router.post(PATH, body(n=3, seed=5, stream=stream))
    if not stream:
        choices = answer.json()["choices"]
        assert [choice["message"]["content"] for choice in choices] == ["w5", None, "w7"]
        assert [choice["finish_reason"] for choice in choices] == ["stop", "tool_calls", "stop"]
        assert answer.json()["usage"]["completion_tokens"] == 3 + 11 + 3
    else:
        events = data_of(answer.content)
        reasons = {event["choices"][0]["index"]: event["choices"][0]["finish_reason"] for event in events[:-1]}
        assert reasons == {0: "stop", 1: "tool_calls", 2: "stop"}
    router.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_in_either_pass(make_router: MakeRouter, stream: bool) -> None:
    for num_before in (0, 1):
        passes = [says(*NO_TOOL, reason="eos_token", last_special=True)] * num_before
        passes.append(failing("a", error=GenerationError("boom")))
        router = make_router(lambda request, passes=passes: passes.pop(0))
        answer = await router.post(PATH, body(stream=stream))
        if stream:
            assert data_of(answer.content)[-2]["error"]["type"] == "server_error"
        else:
            assert answer.status_code == 500
        router.assert_idle()


async def test_an_answer_in_words_whose_prompt_cannot_be_rendered(make_router: MakeRouter) -> None:
    template = "{% if not tools %}{{ raise_exception('tools only') }}{% endif %}x"
    router = make_router(script(NO_TOOL, NO_TOOL), templates={"default": template})
    answer = await router.post(PATH, body())
    assert is_invalid(answer) and answer.json()["error_type"] == "template_error"
    events = data_of((await router.post(PATH, body(stream=True))).content)
    assert events[0]["error"]["type"] == "invalid_request_error" and events[0]["error_type"] == "template_error"
    router.assert_idle()
