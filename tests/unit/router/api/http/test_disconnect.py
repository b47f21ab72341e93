"""`unless_left`: who is cancelled when a client leaves, and who is not."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from starlette.requests import ClientDisconnect

from router.api.http.disconnect import cancel_on_disconnect


class Client:
    """The receiving end of a connection whose client leaves when told to."""

    def __init__(self) -> None:
        self.has_left = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.has_left.wait()
        return {"type": "http.disconnect"}


async def test_work_is_cancelled_when_the_client_leaves():
    client, was_cancelled = Client(), False

    async def work() -> None:
        nonlocal was_cancelled
        client.has_left.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            was_cancelled = True
            raise

    with pytest.raises(ClientDisconnect):
        await cancel_on_disconnect(client.receive, work())
    assert was_cancelled
    await asyncio.sleep(0)  # nothing of the cancellation is left over


async def test_a_client_that_leaves_as_the_work_ends_disturbs_nobody():
    client = Client()

    async def work() -> str:
        client.has_left.set()
        for _ in range(2):  # the news of it is on the way
            await asyncio.sleep(0)
        return "done"

    for _ in range(5):
        with contextlib.suppress(ClientDisconnect):
            assert await cancel_on_disconnect(client.receive, work()) == "done"
        for _ in range(5):
            await asyncio.sleep(0)


async def test_a_cancelled_caller_stays_cancelled():
    client = Client()
    task = asyncio.ensure_future(cancel_on_disconnect(client.receive, asyncio.sleep(30)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
