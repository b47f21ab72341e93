"""The outbox: order, one end, and a caller who leaves."""

from __future__ import annotations

import asyncio

import pytest
from support.factories import make_request

from router.errors import UnhealthyError
from router.events import Failed, Token, TokenGenerated
from router.scheduling.entry import Entry


def token(text: str) -> TokenGenerated:
    return TokenGenerated(Token(1, text, -0.5))


async def test_events_come_in_order_whether_awaited_before_or_after():
    entry = Entry(make_request())
    entry.put(token("a"))
    entry.put(token("b"))
    assert [(await entry.next_event()).token.text for _ in range(2)] == ["a", "b"]
    waiting = asyncio.create_task(entry.next_event())
    await asyncio.sleep(0)
    entry.put(token("c"))
    entry.put(token("d"))
    assert (await waiting).token.text == "c"
    assert entry.num_unread == 1


async def test_nothing_follows_the_end():
    entry = Entry(make_request())
    entry.put(Failed(UnhealthyError()))
    entry.put(token("late"))
    assert isinstance(await entry.next_event(), Failed)
    assert entry.done
    with pytest.raises(RuntimeError):
        await entry.next_event()


async def test_close_is_told_once_and_stops_delivery():
    told: list[Entry] = []
    entry = Entry(make_request(), told.append)
    entry.put(token("a"))
    entry.close()
    entry.close()
    assert told == [entry]
    entry.put(token("b"))
    assert entry.num_unread == 0


async def test_close_wakes_a_reader():
    entry = Entry(make_request())
    waiting = asyncio.create_task(entry.next_event())
    await asyncio.sleep(0)
    entry.close()
    with pytest.raises(RuntimeError):
        await waiting


async def test_a_cancelled_reader_loses_no_event():
    entry = Entry(make_request())
    waiting = asyncio.create_task(entry.next_event())
    await asyncio.sleep(0)
    waiting.cancel()
    entry.put(token("a"))
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await entry.next_event()).token.text == "a"
