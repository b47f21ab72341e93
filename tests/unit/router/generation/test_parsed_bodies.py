"""Bodies of many objects: two at once on their way to the queue, whatever becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_fakes import Router, until

from router.errors import OverloadedError
from router.generation import parsed_bodies
from router.generation.parsed_bodies import ParsedBodies


async def test_a_third_waits_for_a_place() -> None:
    bodies, go = ParsedBodies(), asyncio.Event()
    inside: list[int] = []

    async def request(number: int) -> None:
        await bodies.enter(10)
        inside.append(number)
        await go.wait()
        parsed_bodies.release()
        parsed_bodies.release()  # at its end, once more

    tasks = [asyncio.create_task(request(number)) for number in range(5)]
    await until(lambda: len(inside) == 2)
    tasks[2].cancel()  # while it waits
    await asyncio.wait([tasks[2]])
    assert inside == [0, 1]
    go.set()
    await asyncio.gather(tasks[0], tasks[1], tasks[3], tasks[4])
    assert sorted(inside) == [0, 1, 3, 4] and bodies._places._value == 2


async def test_what_would_wait_behind_too_much_is_refused() -> None:
    bodies = ParsedBodies(max_waiting_bytes=100)
    inside = [asyncio.create_task(bodies.enter(1000)) for _ in range(2)]
    await asyncio.gather(*inside)
    waiting = [asyncio.create_task(bodies.enter(200))]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await bodies.enter(1)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert bodies._waiting_bytes == 0


def many_messages(role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": f"{number} {'x' * 40}"} for number in range(2_500)], **fields}


@pytest.mark.parametrize("limit", [100_000, 10], ids=["served", "too long"])
async def test_every_way_out_gives_the_place_back(router: Router, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    taken: list[int] = []
    enter = ParsedBodies.enter

    async def counted(self: ParsedBodies, num_bytes: int) -> None:
        await enter(self, num_bytes)
        taken.append(self._places._value)

    monkeypatch.setattr(ParsedBodies, "enter", counted)
    chat, tokens = "/v1/chat/completions", "/chat_tokenize"
    bodies = [
        (chat, many_messages()),
        (chat, many_messages(role="")),
        (chat, many_messages(max_tokens=limit)),
        (tokens, many_messages()),
        (chat, many_messages(n=200)),
    ]
    answers = await asyncio.gather(*(router.post(path, body) for path, body in bodies))
    assert {answer.status_code for answer in answers} <= {200, 400}
    assert len(taken) == 5 and set(taken) == {0, 1}
    assert router.app.state.app_state.parsed_bodies._places._value == 2
    router.assert_idle()


@pytest.mark.parametrize("path", ["/tokenize", "/chat_tokenize"])
async def test_a_client_that_reads_slowly_keeps_no_place(
    router: Router, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    places = router.app.state.app_state.parsed_bodies._places
    held: list[int] = []

    async def pieces(*_: object) -> AsyncIterator[bytes]:
        held.append(places._value)
        yield b"[]"

    monkeypatch.setattr("router.api.tgi.tokenize._pieces", pieces)
    body = {"inputs": "{ } " * 25_000} if path == "/tokenize" else many_messages()
    assert (await router.post(path, body)).status_code == 200
    assert held == [2]
