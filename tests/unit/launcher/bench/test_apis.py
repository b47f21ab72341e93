from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.scripted_http import ScriptedServer

from launcher.bench.apis import Api, OpenAiApi, OpenAiChatApi, Sampling, TgiApi, Usage, choose_api
from launcher.http_stream import BadAnswerError, Connection

GREEDY = Sampling(None, ignore_eos=True)


@pytest.mark.parametrize(
    ("api", "event", "is_token"),
    [
        (TgiApi(GREEDY), {"token": {"id": 1}}, True),
        (OpenAiApi(GREEDY, "m"), {"choices": [{"text": "", "finish_reason": None}]}, True),
        (OpenAiApi(GREEDY, "m"), {"choices": [{"text": "", "finish_reason": "length"}]}, False),
        (OpenAiApi(GREEDY, "m"), {"choices": [{"text": "x", "finish_reason": "length"}]}, True),
        (OpenAiApi(GREEDY, "m"), {"choices": [], "usage": {"completion_tokens": 3}}, False),
        (OpenAiChatApi(GREEDY, "m"), {"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]}, False),
        (OpenAiChatApi(GREEDY, "m"), {"choices": [{"delta": {"content": "x"}, "finish_reason": None}]}, True),
        (OpenAiChatApi(GREEDY, "m"), {"choices": [{"delta": {}, "finish_reason": "stop"}]}, False),
    ],
    ids=["tgi", "half a character", "the end", "text at the end", "usage", "role", "content", "chat's end"],
)
def test_which_events_bring_a_token(api: Api, event: dict[str, Any], is_token: bool) -> None:
    assert api.read(event, Usage()) is is_token


def test_the_servers_own_count_is_taken() -> None:
    usage = Usage()
    TgiApi(GREEDY).read({"token": {}, "details": {"generated_tokens": 7, "input_length": 5}}, usage)
    assert (usage.prompt_tokens, usage.output_tokens) == (5, 7)
    OpenAiApi(GREEDY, "m").read({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}, usage)
    assert (usage.prompt_tokens, usage.output_tokens) == (3, 4)


@pytest.mark.parametrize("api", [TgiApi(GREEDY), OpenAiApi(GREEDY, "m")], ids=["tgi", "openai"])
def test_an_error_inside_the_stream_is_an_error(api: Api) -> None:
    with pytest.raises(BadAnswerError, match="out of"):
        api.read({"error": {"message": "out of luck"}}, Usage())


def test_bodies_ask_for_what_the_options_say() -> None:
    native = TgiApi(Sampling(0.5, ignore_eos=False)).body("p", 3)
    assert native == {
        "inputs": "p",
        "parameters": {"details": True, "do_sample": True, "temperature": 0.5, "max_new_tokens": 3},
    }
    chat = OpenAiChatApi(GREEDY, "m").body("p", 3)
    assert chat["messages"] == [{"role": "user", "content": "p"}]
    assert (chat["ignore_eos"], chat["temperature"], chat["max_tokens"]) == (True, 0.0, 3)


async def test_auto_tells_tgi_by_its_info(
    server: ScriptedServer, connection: Connection, answer: Callable[..., bytes]
) -> None:
    server.answers = [answer(b'{"model_id":"m","max_concurrent_requests":128}')]
    assert isinstance(await choose_api("auto", connection, GREEDY, None), TgiApi)


async def test_auto_takes_openai_otherwise_and_its_first_model(
    server: ScriptedServer, answer: Callable[..., bytes]
) -> None:
    server.answers = [answer(b"nothing", "404 Not Found"), answer(b'{"data":[{"id":"first"},{"id":"second"}]}')]
    below = Connection(f"{server.url}/base", {})
    api = await choose_api("auto", below, GREEDY, None)
    below.close()
    assert api.body("p", 1)["model"] == "first"
    assert server.requests[1].startswith(b"GET /base/v1/models ")


async def test_without_a_model_to_name_the_flag_is_named(
    server: ScriptedServer, connection: Connection, answer: Callable[..., bytes]
) -> None:
    server.answers = [answer(b'{"data":[]}')]
    with pytest.raises(BadAnswerError, match="--model"):
        await choose_api("openai", connection, GREEDY, None)
