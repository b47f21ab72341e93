from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from support.scripted_http import ScriptedServer

from launcher.bench.apis import Sampling, TgiApi
from launcher.bench.load import Load, Progress, Target

TOKEN = b'{"token":{"id":1}}'
LAST = b'{"token":{"id":1},"details":{"generated_tokens":2,"input_length":9}}'


def target(server: ScriptedServer) -> Target:
    return Target(url=server.url, api=TgiApi(Sampling(None, ignore_eos=True)), timeout_s=60)


async def test_a_closed_loop_answers_every_prompt(server: ScriptedServer, events: Callable[..., bytes]) -> None:
    server.answers = [events(TOKEN, LAST)] * 5
    progress = Progress()
    cell = await Load(target(server), 2, progress).closed([f"p{i}" for i in range(5)], 2)
    assert (cell.load, cell.num_requests, cell.errors, cell.short_requests) == ("2 clients", 5, 0, 0)
    assert cell.prompt_tokens == 9
    assert server.num_connections == 2
    assert (progress.answered, progress.tokens, progress.running) == (5, 10, 0)
    assert sorted(r.split(b'"inputs":"')[1][:2] for r in server.requests) == [b"p0", b"p1", b"p2", b"p3", b"p4"]


async def test_failures_are_counted_and_the_first_is_kept(
    server: ScriptedServer, events: Callable[..., bytes], answer: Callable[..., bytes]
) -> None:
    server.answers = [answer(b"overloaded", "429 Too Many Requests"), events(TOKEN, LAST), events()]
    cell = await Load(target(server), 2).closed(["a", "b", "c"], 1)
    assert (cell.num_requests, cell.errors) == (1, 2)
    assert cell.first_error is not None and "overloaded" in cell.first_error


async def test_an_error_in_a_stream_leaves_the_next_request_alone(
    server: ScriptedServer, events: Callable[..., bytes]
) -> None:
    server.answers = [events(TOKEN, b'{"error":"out of memory"}', LAST), *[events(TOKEN, LAST)] * 9]
    cell = await Load(target(server), 2).closed([f"p{i}" for i in range(10)], 1)
    assert (cell.num_requests, cell.errors) == (9, 1)
    assert cell.first_error is not None and "out of memory" in cell.first_error


async def test_answers_shorter_than_asked_for_are_told(server: ScriptedServer, events: Callable[..., bytes]) -> None:
    server.answers = [events(TOKEN, LAST)]
    cell = await Load(target(server), 3).closed(["a"], 1)
    assert (cell.short_requests, cell.load) == (1, "1 client")


async def test_an_open_loop_sends_without_waiting_for_answers(
    server: ScriptedServer, events: Callable[..., bytes]
) -> None:
    server.answers = [events(TOKEN, LAST)] * 6
    cell = await Load(target(server), 2).open(["p"] * 6, rate=200.0, seed=1)
    assert (cell.load, cell.num_requests, cell.errors) == ("200 requests/s", 6, 0)
    assert server.num_connections == 6


async def test_an_event_that_comes_in_two_pieces_is_one(server: ScriptedServer) -> None:
    piece = b'data: {"token":{"id":1}'
    rest = b"}\n\n"
    body = b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(piece), piece, len(rest), rest)
    server.answers = [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body]
    cell = await Load(target(server), 1).closed(["a"], 1)
    assert (cell.num_requests, cell.errors) == (1, 0)


async def test_what_is_no_event_of_the_api_is_an_error_of_its_request(
    server: ScriptedServer, events: Callable[..., bytes]
) -> None:
    server.answers = [events(TOKEN, b"[1]"), events(TOKEN, LAST), events(b"{")]
    cell = await Load(target(server), 2).closed(["a", "b", "c"], 1)
    assert (cell.num_requests, cell.errors) == (1, 2)
    assert cell.first_error == "an event that is not a JSON object: [1]"


async def test_a_late_client_does_not_hide_that_the_answer_was_late(
    server: ScriptedServer, events: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's own loop sleeps too long, as on a machine that the server keeps busy."""
    sleep = asyncio.sleep

    async def oversleep(seconds: float) -> None:
        await sleep(seconds + 0.3)

    monkeypatch.setattr("launcher.bench.load.asyncio.sleep", oversleep)
    server.answers = [events(TOKEN, LAST)] * 3
    cell = await Load(target(server), 2).open(["p"] * 3, rate=100.0, seed=1)
    assert cell.ttft_p50 >= 0.3
