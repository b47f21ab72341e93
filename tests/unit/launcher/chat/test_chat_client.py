"""Answers of a server, and its refusals in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from support.scripted_http import ScriptedServer

from launcher.chat.client import ChatClient, ChatError, Figures, Piece
from launcher.chat.config import ChatConfig
from wire.cli.parsing import UsageError, parse

Build = Callable[..., bytes]
MESSAGES = [{"role": "user", "content": "Hi"}]
MODELS = b'{"data": [{"id": "some/model"}]}'


def delta(text: str | None, finish_reason: str | None = None) -> bytes:
    return orjson.dumps({"choices": [{"delta": {"content": text}, "finish_reason": finish_reason}]})


def body_of(request: bytes) -> Any:
    return orjson.loads(request.partition(b"\r\n\r\n")[2])


NO_INFO = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}"
SAMPLING = {"temperature": 0, "max_tokens": 5}


async def answer_of(client: ChatClient) -> list[str]:
    return [piece.text async for piece in client.answer(MESSAGES, SAMPLING)]


async def test_an_answer_in_pieces(server: ScriptedServer, answer: Build, events: Build) -> None:
    server.answers = [
        answer(MODELS),
        NO_INFO,
        events(b'{"choices": []}', delta("Hel"), delta("lo"), delta(None, "stop"), b"[DONE]"),
    ]
    client = ChatClient(server.url + "/v1/", "k3y", None)
    assert await answer_of(client) == ["Hel", "lo"]
    assert not client.figures.was_cut
    assert body_of(server.requests[2]) == {
        "model": "some/model", "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0, "max_tokens": 5,
    }  # fmt: skip
    assert server.requests[2].startswith(b"POST /v1/chat/completions ")
    assert all(b"\r\nauthorization: Bearer k3y\r\n" in request for request in server.requests)


async def test_reasoning_comes_apart_and_tokens_are_the_servers(server: ScriptedServer, events: Build) -> None:
    thought = b'{"choices": [{"delta": {"reasoning": "Hm", "reasoning_content": "Hm"}}]}'
    usage = b'{"choices": [], "usage": {"completion_tokens": 7}}'
    server.answers = [events(thought, delta("Yes"), usage)]
    client = ChatClient(server.url, None, "m")
    assert [piece async for piece in client.answer(MESSAGES)] == [Piece("Hm", is_reasoning=True), Piece("Yes")]
    assert client.figures.tokens == 7 and str(client.figures).startswith("7 tokens, ")


def test_figures() -> None:
    assert str(Figures()) == ""
    assert str(Figures(started=1.0, first=1.5, last=1.5, pieces=1)) == "1 token, first after 0.50 s"
    assert str(Figures(started=1.0, first=1.5, last=2.5, pieces=11)) == "11 tokens, 10.0 tokens/s, first after 0.50 s"


async def test_a_base_model_is_refused_at_once(server: ScriptedServer, answer: Build) -> None:
    server.answers = [answer(MODELS), answer(b'{"has_chat_template": false}')]
    with pytest.raises(ChatError, match="some/model has no chat template: take a model made for chats"):
        await ChatClient(server.url, None, None).greet()


async def test_the_model_is_looked_up_once(server: ScriptedServer, answer: Build, events: Build) -> None:
    server.answers = [answer(MODELS), NO_INFO, events(delta("a")), events(delta("b", "length"))]
    client = ChatClient(server.url, None, None)
    assert await client.greet() == "some/model"
    assert [await answer_of(client), await answer_of(client)] == [["a"], ["b"]]
    assert client.figures.was_cut
    assert len(server.requests) == 4
    assert b"authorization" not in b"".join(server.requests)


async def test_a_model_of_several(server: ScriptedServer, events: Build) -> None:
    server.answers = [events(delta("a"))]
    assert await answer_of(ChatClient(server.url, None, "other")) == ["a"]
    assert body_of(server.requests[0])["model"] == "other"


SEVERAL = b"""{"data": [
    {"id": "cold", "task": "generate", "status": {"value": "unloaded"}},
    {"id": "vectors", "task": "embed", "status": {"value": "loaded"}},
    {"id": "org/warm", "task": "generate", "status": {"value": "loaded"}}
]}"""


async def test_of_several_models_a_loaded_one_that_chats(server: ScriptedServer, answer: Build, events: Build) -> None:
    server.answers = [answer(SEVERAL), NO_INFO, answer(SEVERAL), answer(SEVERAL), events(delta("a"))]
    client = ChatClient(server.url, None, None)
    assert await client.greet() == "org/warm"
    assert server.requests[1].startswith(b"GET /info?model=org/warm ")
    assert await client.switch("") == "org/warm answers; the server has org/warm, cold"
    assert await client.switch("cold") == "cold answers from now on."
    assert await answer_of(client) == ["a"]
    assert body_of(server.requests[4])["model"] == "cold"


@pytest.mark.parametrize(("body", "status"), [(b"{}", "404 Not Found"), (b"[]", "200 OK"), (b"<html>", "200 OK")])
async def test_a_server_that_lists_no_model(server: ScriptedServer, answer: Build, body: bytes, status: str) -> None:
    server.answers = [answer(body, status), NO_INFO]
    assert await ChatClient(server.url, None, None).greet() == "tgi"


@pytest.mark.parametrize(
    ("key", "status", "body", "message"),
    [
        (
            None,
            "401 Unauthorized",
            b"{}",
            "{url} demands an API key; give its key with --api-key or",
        ),
        ("k", "401 Unauthorized", b"{}", "{url} does not accept this API key; give its key with --api-key"),
        (None, "404 Not Found", b"no route", "{url} has no OpenAI chat API: status 404: no route"),
        (None, "404 Not Found", b'{"error": {"message": "it embeds"}}', "{url} has no OpenAI chat API: it embeds"),
        (
            None,
            "422 Bad",
            b'{"error": "Template error: no template", "error_type": "x"}',
            "Template error: no template",
        ),
        (None, "422 Bad", b'{"error": "Template error: template not found"}', "m has no chat template: take"),
        (None, "400 Bad", b'{"error": {"message": "Template error: template not found: give one"}}', "m has no chat"),
        (None, "400 Bad", b'{"error": {"message": "too long"}}', "too long"),
        (None, "503 Busy", b"busy", "{url}: status 503: busy"),
        (None, "503 Busy", b"[1]", "{url}: status 503: [1]"),
    ],
)
async def test_refusals(
    server: ScriptedServer, answer: Build, key: str | None, status: str, body: bytes, message: str
) -> None:
    server.answers = [answer(body, status)]
    with pytest.raises(ChatError) as caught:
        await answer_of(ChatClient(server.url, key, "m"))
    assert str(caught.value).startswith(message.format(url=server.url))


async def test_an_error_in_the_stream(server: ScriptedServer, events: Build) -> None:
    server.answers = [events(delta("Hel"), b'{"error": {"message": "the shard failed"}}')]
    parts = []
    with pytest.raises(ChatError, match="the shard failed"):
        async for piece in ChatClient(server.url, None, "m").answer(MESSAGES):
            parts.append(piece)
    assert parts == [Piece("Hel")]


async def test_an_answer_that_breaks_off(server: ScriptedServer, events: Build) -> None:
    server.answers = [events(delta("Hel"))[:-5]]
    server.close_after_each = True
    with pytest.raises(ChatError, match="closed in the middle"):
        await answer_of(ChatClient(server.url, None, "m"))


async def test_no_server() -> None:
    with pytest.raises(ChatError, match=r"no server answers at http://127\.0\.0\.1:1 \(Connection refused\); give"):
        await ChatClient("http://127.0.0.1:1", None, None).greet()


def test_no_url() -> None:
    for url in ("ftp://localhost", "", "http:///v1"):
        with pytest.raises(ChatError, match="is not an http:// or https:// URL"):
            ChatClient(url, None, None)
    assert ChatClient("localhost:80/v1/", None, None).url == "http://localhost:80"


def test_options_for_the_server_stand_behind_dashes() -> None:
    config = parse(ChatConfig, ["demo", "--max-tokens", "1k", "--", "--num-shard", "2"], {"API_KEY": "k"})
    assert (config.model_id, config.server_options, config.api_key) == ("demo", ["--num-shard", "2"], "k")
    assert config.sampling == {"max_tokens": 1024}
    with pytest.raises(UsageError, match="'--num-shard' found; write '-- --num-shard' to hand it on"):
        parse(ChatConfig, ["demo", "--num-shard", "2"], {})
    with pytest.raises(UsageError, match="a similar one exists: '--temperature'"):
        parse(ChatConfig, ["demo", "--temprature", "2"], {})
