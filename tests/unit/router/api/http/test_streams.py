"""Streams over real sockets: disconnects, keep-alive, readers that stop, one write per token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import Router, says, until

from router.api.http.sse import EventStream
from router.events import Token, TokenGenerated

MakeRouter = Callable[..., Router]
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def http(path: str, body: Any) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "x"}),
        ("/generate", {"inputs": "x", "parameters": {"best_of": 2, "do_sample": True}}),
        ("/generate_stream", {"inputs": "x"}),
        ("/", {"inputs": "x"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/chat/completions", CHAT | {"stream": True, "n": 3}),
        ("/v1/chat/completions", CHAT | {"n": 3}),
        ("/v1/completions", {"prompt": "x", "n": 3}),
        ("/invocations", {"inputs": "x"}),
        ("/vertex", {"instances": [{"inputs": "x"}]}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/completions", {"prompt": "x", "stream": True, "n": 3}),
    ],
)
@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_client_that_leaves_gives_everything_back(
    make_router: MakeRouter, path: str, body: Any, tokens: int
) -> None:
    events = [TokenGenerated(Token(1, "a", -1.0))] * tokens
    router = make_router(lambda request: [*events, None])
    async with router.listening() as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http(path, body))
        await until(lambda: bool(router.scheduler.open))
        assert router.inference.permit_pool.num_taken == len(router.scheduler.open) or body.get("n")
        writer.close()
        await until(lambda: not router.scheduler.open)
        await until(lambda: router.inference.permit_pool.num_taken == 0)


async def test_a_client_that_leaves_before_the_body_is_complete(router: Router) -> None:
    async with router.listening() as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http("/generate", {"inputs": "x"})[:-3])
        await asyncio.sleep(0.05)
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http("/generate", {"inputs": "x"}))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
    router.assert_idle()


async def test_the_headers_come_before_the_first_token(make_router: MakeRouter) -> None:
    router = make_router(lambda request: [None])
    async with router.listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http("/generate_stream", {"inputs": "x"}))
        assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 200")
        writer.close()
        await until(lambda: not router.scheduler.open)


async def test_each_token_is_one_chunk(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says("a", "b", "c"))
    sent: list[dict[str, Any]] = []
    raw = json.dumps(CHAT | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    messages = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b"",
        "root_path": "", "http_version": "1.1", "scheme": "http", "server": ("x", 80), "client": ("y", 1),
    }  # fmt: skip
    await router.app(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start"] + ["http.response.body"] * 4
    bodies = [message["body"] for message in sent[1:]]
    assert [body.count(b"data: ") for body in bodies] == [1, 1, 3, 0]
    assert bodies[2].endswith(b"data: [DONE]\n\n")
    router.assert_idle()


class Closer:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


async def run_stream(stream: EventStream, send: Any, *, leave: asyncio.Event | None = None) -> None:
    async def receive() -> dict[str, Any]:
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    await stream({"type": "http"}, receive, send)


async def test_silence_is_filled_with_comments() -> None:
    sent: list[bytes] = []
    enough = asyncio.Event()

    async def events() -> Any:
        yield b"data: 1\n\n"
        await enough.wait()
        yield b"data: 2\n\n"

    async def send(message: Any) -> None:
        sent.append(message.get("body", b"head"))
        if sent.count(b":\n\n") == 2:
            enough.set()

    closer = Closer()
    await run_stream(EventStream(events(), headers={}, close=closer, stalled_s=5, keep_alive_s=0.1), send)
    assert sent[:2] == [b"head", b"data: 1\n\n"] and sent[-2:] == [b"data: 2\n\n", b""]
    assert 2 <= sent.count(b":\n\n") <= 3
    assert closer.times == 1


async def test_a_reader_that_stops_is_given_up() -> None:
    async def events() -> Any:
        while True:
            yield b"data: x\n\n"

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    closer = Closer()
    await asyncio.wait_for(run_stream(EventStream(events(), headers={}, close=closer, stalled_s=0.1), send), 60)
    assert closer.times == 1


async def test_leaving_ends_the_events_at_once() -> None:
    ended = Closer()

    async def events() -> Any:
        try:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            ended()

    leave = asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            leave.set()

    closer = Closer()
    stream = EventStream(events(), headers={}, close=closer, stalled_s=5)
    await asyncio.wait_for(run_stream(stream, send, leave=leave), 60)
    assert (closer.times, ended.times) == (1, 1)


async def test_a_write_that_fails_closes_too() -> None:
    async def events() -> Any:
        yield b"data: 1\n\n"

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("gone")

    closer = Closer()
    with pytest.raises(OSError, match="gone"):
        await run_stream(EventStream(events(), headers={}, close=closer, stalled_s=5), send)
    assert closer.times == 1
