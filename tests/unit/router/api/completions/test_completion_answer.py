"""Choices of completions: texts without their stop, logprobs and offsets, echo, the best of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from router_fakes import LIMITS, Router, data_of, is_invalid, message_of, says

from router.config import RouterConfig
from router.events import Finished, PlacesTop, Prefilled, Token

MakeRouter = Callable[..., Router]

PATH = "/v1/completions"


def body(prompt: Any = "Hello", **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt} | fields


async def texts(router: Router, asked: Any) -> list[str]:
    answer = await router.post(PATH, asked)
    assert answer.status_code == 200, answer.text
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(len(answer.json()["choices"])))
    return [choice["text"] for choice in answer.json()["choices"]]


@pytest.mark.parametrize(
    ("pieces", "stop", "said"),
    [
        (["Hel", "lo", " END"], "END", ["Hel", "lo", " "]),
        (["Hello E", "N", "D"], ["END", ""], ["Hello ", "", ""]),
        (["aENDb"], ["END"], ["a"]),
    ],
)
async def test_a_stop_is_dropped_and_never_streamed_in_part(
    make_router: MakeRouter, pieces: list[str], stop: Any, said: list[str]
) -> None:
    router = make_router(lambda request: says(*pieces, reason="stop_sequence"))
    events = data_of((await router.post(PATH, body(stream=True, stop=stop))).content)
    assert [event["choices"][0]["text"] for event in events[:-1]] == said
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("pieces", [("Hello", "END"), ("Hello", "E", "ND"), ("Hello", "ENDing")])
async def test_a_stop_in_the_last_allowed_token(make_router: MakeRouter, pieces: tuple[str, ...]) -> None:
    """It ended the answer, whatever the limit; TGI's routes say `length`, as TGI does."""
    router = make_router(lambda request: says(*pieces, reason="length", text="HelloEND"))
    choice = (await router.post(PATH, body(stop=["END", "ZZ"]))).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "stop")
    events = data_of((await router.post(PATH, body(stop=["END", "ZZ"], stream=True))).content)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "Hello"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    kept = body(stop=["END", "ZZ"], include_stop_str_in_output=True)
    choice = (await router.post(PATH, kept)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("HelloEND", "stop")
    messages = {"messages": [{"role": "user", "content": "x"}], "stop": "END"}
    choice = (await router.post("/v1/chat/completions", messages)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", "stop")
    events = data_of((await router.post("/v1/chat/completions", messages | {"stream": True})).content)
    assert "".join(event["choices"][0]["delta"]["content"] for event in events[:-1]) == "Hello"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    answer = await router.post("/generate", {"inputs": "x", "parameters": {"stop": ["END"], "details": True}})
    assert answer.json()["generated_text"] == "HelloEND" and answer.json()["details"]["finish_reason"] == "length"
    for path, reason in (("/v1/messages", "stop_sequence"), ("/v1/responses", "completed")):
        asked = {"messages": messages["messages"], "max_tokens": 9, "stop_sequences": ["END"]}
        asked = asked if path == "/v1/messages" else {"input": "x", "stop": "END"}
        answer = (await router.post(path, {"model": "m"} | asked)).json()
        assert answer.get("stop_reason", answer.get("status")) == reason, answer


async def test_a_beginning_of_a_stop_at_the_limit_is_said(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says("Hello", "EN", reason="length"))
    events = data_of((await router.post(PATH, body(stop="END", stream=True))).content)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "HelloEN"


async def test_a_json_answer_lacks_the_stop(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says("Hello", "END", reason="stop_sequence"))
    choice = (await router.post(PATH, body(stop="END"))).json()["choices"][0]
    assert choice["text"] == "Hello" and choice["finish_reason"] == "stop"


async def test_logprobs(make_router: MakeRouter) -> None:
    top = (Token(1, "x", -0.1), Token(2, "a", -0.2), Token(3, "y", float("-inf")))
    router = make_router(
        lambda request: says("a", "ßß", "</s>", reason="eos_token", last_special=True, top_tokens=top)
    )  # fmt: skip
    alternatives = {"x": -0.1, "a": -0.2, "y": None}
    whole = {
        "tokens": ["a", "ßß", "</s>"],
        "token_logprobs": [0.0, -0.25, -0.5],
        "top_logprobs": [alternatives, alternatives | {"ßß": -0.25}, alternatives | {"</s>": -0.5}],
        "text_offset": [0, 1, 3],
    }
    choice = (await router.post(PATH, body(logprobs=3))).json()["choices"][0]
    assert choice["logprobs"] == whole and choice["text"] == "aßß"
    assert router.scheduler.last.top_n_tokens == 3
    events = data_of((await router.post(PATH, body(logprobs=3, stream=True))).content)
    for name, values in whole.items():
        assert [event["choices"][0]["logprobs"][name] for event in events[:-1]] == [[value] for value in values]
    choice = (await router.post(PATH, body(logprobs=0))).json()["choices"][0]
    assert choice["logprobs"] == whole | {"top_logprobs": [{"a": 0.0}, {"ßß": -0.25}, {"</s>": -0.5}]}
    assert router.scheduler.last.top_n_tokens == 0


async def test_offsets_stay_within_a_text_that_lost_its_stop(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says("ab", "E", "ND", reason="stop_sequence"))
    choice = (await router.post(PATH, body(logprobs=1, stop="END"))).json()["choices"][0]
    assert choice["text"] == "ab" and choice["logprobs"]["text_offset"] == [0, 2, 2]


async def test_echo(router: Router) -> None:
    assert await texts(router, body(["Hello", "Bye"], echo=True)) == ["Hello one two", "Bye one two"]
    events = data_of((await router.post(PATH, body(echo=True, stream=True))).content)
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["Hello one", " two"]


async def test_echo_with_logprobs_of_the_prompt(make_router: MakeRouter) -> None:
    prompt = "Zwölf fox"

    def script(request: Any) -> Any:
        tokens = [Token(i, f"t{i}", float("nan") if not index else -0.5) for index, i in enumerate(request.input_ids)]
        best = [(i + 1, f"t{i + 1}", -0.25) for i in request.input_ids[1:]]
        return [Prefilled(tuple(tokens), PlacesTop(1, *zip(*best, strict=True))), *says(" one", " two")]

    router = make_router(script, config=RouterConfig(tokenizer_name="some/model", request_logprobs=True))
    choice = (await router.post(PATH, body(prompt, echo=True, logprobs=1))).json()["choices"][0]
    logprobs, length = choice["logprobs"], router.scheduler.last.input_length
    assert router.scheduler.last.decoder_input_details
    assert choice["text"] == prompt + " one two"
    assert logprobs["token_logprobs"] == [None, *[-0.5] * (length - 1), 0.0, -0.25]
    ids = router.scheduler.last.input_ids[1:]
    tops = [{f"t{i + 1}": -0.25, f"t{i}": -0.5} for i in ids]  # the best, and the token of the prompt itself
    assert logprobs["top_logprobs"] == [None, *tops, {" one": 0.0}, {" two": -0.25}]
    offsets = logprobs["text_offset"]
    assert offsets[:2] == [0, 0] and offsets == sorted(offsets) and offsets[-2:] == [len(prompt), len(prompt) + 4]
    assert {len(values) for values in logprobs.values()} == {length + 2}
    answer = await router.post(PATH, body(prompt, echo=True, logprobs=1, stream=True))
    assert is_invalid(answer) and "streaming" in message_of(answer)
    router.scheduler.script = lambda request: says(" one")
    answer = await router.post(PATH, body(prompt, echo=True, logprobs=1))
    assert answer.status_code == 500, "a model server that computes none"


async def test_echo_with_logprobs_needs_a_server_that_has_them(router: Router) -> None:
    answer = await router.post(PATH, body(echo=True, logprobs=0))
    assert is_invalid(answer) and "--enable-prefill-logprobs" in message_of(answer)


async def test_best_of_answers_with_the_likeliest(make_router: MakeRouter) -> None:
    def script(request: Any) -> Any:
        (event,) = says(f"s{request.sampling.seed}")
        assert isinstance(event, Finished)
        return [replace(event, token=replace(event.token, logprob=-abs(request.sampling.seed - 6.2)))]

    router = make_router(script, limits=replace(LIMITS, max_best_of=4))
    answer = await router.post(PATH, body(seed=5, n=2, best_of=4))
    got = answer.json()
    assert [(choice["index"], choice["text"]) for choice in got["choices"]] == [(0, "s6"), (1, "s7")]
    assert got["usage"]["completion_tokens"] == 4, "of all that was generated"
    assert await texts(router, body(seed=5, n=3, best_of=3)) == ["s5", "s6", "s7"]
    assert await texts(router, body(["a", "b"], seed=5, best_of=2)) == ["s6", "s6"]
    router.assert_idle()
