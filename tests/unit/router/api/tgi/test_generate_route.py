"""Golden bodies of `/`, `/generate` and `/generate_stream`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from router_fakes import Router, data_of, failing, says

from router.errors import GenerationError, IncompleteError
from router.events import Prefilled, Token

MakeRouter = Callable[..., Router]


async def test_generate_answers_with_the_text_alone(router: Router) -> None:
    answer = await router.post("/generate", {"inputs": "Hello"})
    assert answer.status_code == 200
    assert answer.content == b'{"generated_text":" one two"}'
    router.assert_idle()


async def test_without_parameters_a_request_samples_and_with_empty_ones_it_does_not(router: Router) -> None:
    await router.post("/generate", {"inputs": "Hello"})
    assert router.scheduler.last.sampling.do_sample
    await router.post("/generate", {"inputs": "Hello", "parameters": None})
    assert router.scheduler.last.sampling.do_sample
    await router.post("/generate", {"inputs": "Hello", "parameters": {}})
    assert not router.scheduler.last.sampling.do_sample


async def test_details_have_the_order_and_the_floats_of_tgi(make_router: MakeRouter) -> None:
    top = [Token(7, "é", -0.1), Token(8, "\n", -math.inf)]
    events = [Prefilled((Token(0, "<s>", math.nan), Token(5, "Hi", np.float32(-1.2345678806304932))))]
    router = make_router(
        lambda request: events + says(" a", "</s>", reason="eos_token", last_special=True, top_tokens=top)
    )
    parameters = {"decoder_input_details": True, "top_n_tokens": 2, "seed": 3}
    answer = await router.post("/generate", {"inputs": "Hi", "parameters": parameters})
    tops = '[{"id":7,"text":"é","logprob":-0.1,"special":false},{"id":8,"text":"\\n","logprob":null,"special":false}]'
    assert answer.text == (
        '{"generated_text":" a","details":{"finish_reason":"eos_token","generated_tokens":2,"seed":null,'
        '"prefill":[{"id":0,"text":"<s>","logprob":null},{"id":5,"text":"Hi","logprob":-1.2345679}],'
        '"tokens":[{"id":100,"text":" a","logprob":0.0,"special":false},'
        '{"id":101,"text":"</s>","logprob":-0.25,"special":true}],'
        f'"top_tokens":[{tops},{tops}]}}}}'
    )
    assert router.scheduler.last.decoder_input_details


async def test_prefill_is_an_empty_list_unless_asked_for(router: Router) -> None:
    answer = await router.post("/generate", {"inputs": "Hi", "parameters": {"details": True}})
    details = answer.json()["details"]
    assert list(details) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
    assert details["prefill"] == []


async def test_best_of_returns_the_likeliest_and_the_others(make_router: MakeRouter) -> None:
    answers = [says(" worst", " x", " y", seed=1), says(" best", seed=2)]
    router = make_router(lambda request: answers.pop(0))
    parameters = {"best_of": 2, "do_sample": True, "details": True}
    answer = await router.post("/generate", {"inputs": "Hi", "parameters": parameters})
    body = answer.json()
    assert body["generated_text"] == " best"
    assert body["details"]["seed"] == 2
    others = body["details"]["best_of_sequences"]
    assert [other["generated_text"] for other in others] == [" worst x y"]
    assert list(others[0]) == ["generated_text", "finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
    assert answer.headers["x-generated-tokens"] == "1"
    seeds = {request.sampling.seed for request in router.scheduler.submitted}
    assert len(seeds) == 2
    router.assert_idle()


async def test_best_of_fails_as_a_whole(make_router: MakeRouter) -> None:
    answers = [[None], failing(" x", error=GenerationError("Server error: boom"))]
    router = make_router(lambda request: answers.pop(0))
    answer = await router.post("/generate", {"inputs": "Hi", "parameters": {"best_of": 2, "do_sample": True}})
    assert answer.status_code == 424
    assert answer.json() == {
        "error": "Request failed during generation: Server error: boom",
        "error_type": "generation",
    }
    router.assert_idle()


async def test_the_root_answers_a_list_with_the_prompt_repeated(router: Router) -> None:
    answer = await router.post("/", {"inputs": "Hello", "parameters": {}})
    assert answer.content == b'[{"generated_text":"Hello one two"}]'
    answer = await router.post("/", {"inputs": "Hello", "parameters": {"return_full_text": False}})
    assert answer.content == b'[{"generated_text":" one two"}]'
    answer = await router.post("/", {"inputs": "Hello", "stream": True})
    assert data_of(answer.content)[-1]["generated_text"] == "Hello one two"


async def test_the_bytes_of_a_stream(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says(" the", " dog", reason="length"))
    body = {"inputs": "Hello fox", "parameters": {"details": True}}
    answer = await router.post("/generate_stream", body)
    assert answer.status_code == 200
    length = router.scheduler.last.input_length
    assert answer.content.decode() == (
        'data: {"index":1,"token":{"id":100,"text":" the","logprob":0.0,"special":false},'
        '"generated_text":null,"details":null}\n\n'
        'data: {"index":2,"token":{"id":101,"text":" dog","logprob":-0.25,"special":false},'
        '"generated_text":" the dog","details":{"finish_reason":"length","generated_tokens":2,"seed":null,'
        f'"input_length":{length}}}}}\n\n'
    )
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-compute-type"] == "gpu+optimized"
    assert answer.headers["x-compute-characters"] == "9"
    router.assert_idle()


async def test_a_stream_without_details_and_with_full_text(router: Router) -> None:
    body = {"inputs": "Hello", "parameters": {"return_full_text": True}}
    last = data_of((await router.post("/generate_stream", body)).content)[-1]
    assert last["generated_text"] == "Hello one two" and last["details"] is None


async def test_top_tokens_of_a_stream_are_left_out_when_empty(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says(" a", top_tokens=[Token(1, "x", -1.5)]))
    events = data_of(
        (await router.post("/generate_stream", {"inputs": "Hi", "parameters": {"top_n_tokens": 1}})).content
    )
    assert events[0]["top_tokens"] == [{"id": 1, "text": "x", "logprob": -1.5, "special": False}]
    assert list(events[0]) == ["index", "token", "top_tokens", "generated_text", "details"]


async def test_a_failure_inside_of_a_stream_is_an_event(make_router: MakeRouter) -> None:
    router = make_router(lambda request: failing(" a", error=GenerationError("Server error: boom")))
    answer = await router.post("/generate_stream", {"inputs": "Hi"})
    assert answer.status_code == 200
    assert data_of(answer.content)[1:] == [
        {"error": "Request failed during generation: Server error: boom", "error_type": "generation"}
    ]
    router.assert_idle()


async def test_a_stream_that_ends_without_a_last_token(make_router: MakeRouter) -> None:
    router = make_router(lambda request: failing(" a", error=IncompleteError()))
    answer = await router.post("/generate_stream", {"inputs": "Hi"})
    assert data_of(answer.content)[-1] == {
        "error": "Incomplete generation stream",
        "error_type": "incomplete_generation_stream",
    }
    answer = await router.post("/generate", {"inputs": "Hi"})
    assert answer.status_code == 500
    assert answer.json() == {"error": "Incomplete generation", "error_type": "incomplete_generation"}
    assert b'tgi_request_failure{err="incomplete"} 2' in router.metrics.render()


async def test_headers_of_a_json_answer(router: Router) -> None:
    answer = await router.post("/generate", {"inputs": "Hello ö"})
    headers = answer.headers
    assert headers["x-compute-characters"] == "7"
    assert headers["x-prompt-tokens"] == str(router.scheduler.last.input_length)
    assert headers["x-generated-tokens"] == "2"
    assert 0 <= float(headers["x-compute-time"]) < 5
    for name in ("x-total-time", "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token"):
        assert headers[name].isdigit()
    assert headers["content-type"] == "application/json"


async def test_text_generations_own_client_sends_every_optional_as_null(router: Router) -> None:
    nulls = (
        "repetition_penalty", "frequency_penalty", "return_full_text", "seed", "temperature", "top_k", "top_p",
        "truncate", "typical_p", "best_of", "top_n_tokens", "grammar", "adapter_id", "max_new_tokens",
    )  # fmt: skip
    parameters = {
        "do_sample": False, "stop": [], "watermark": False, "details": True, "decoder_input_details": False,
    } | dict.fromkeys(nulls)  # fmt: skip
    answer = await router.post("/", {"inputs": "Hi", "parameters": parameters, "stream": False})
    assert answer.status_code == 200
    plain = dict.fromkeys(parameters)
    answer = await router.post("/generate", {"inputs": "Hi", "parameters": plain, "unknown": {"x": [1]}})
    assert answer.status_code == 200


async def test_what_the_scheduler_gets(router: Router) -> None:
    parameters = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "typical_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2,
        "frequency_penalty": -0.5, "seed": 2**64 - 1, "stop": ["a", "", "b"], "max_new_tokens": 9, "ignore_eos": True,
        "watermark": True, "min_tokens": 4,
    }  # fmt: skip
    await router.post("/generate", {"inputs": "Hi", "parameters": parameters})
    request = router.scheduler.last
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.typical_p) == (0.5, 7, 0.9, 0.8)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.frequency_penalty) == (0.05, 1.2, -0.5)
    assert (
        sampling.min_tokens == 4
        and sampling.watermark
        and sampling.seed == 2**64 - 1
        and sampling.absolute_frequency_penalty == 0
    )
    assert request.stopping.stop_sequences == ("a", "b")
    assert request.stopping.max_new_tokens == 9
    assert request.stopping.ignore_eos_token
    assert request.truncate == 2000
