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
    assert len(entry._events) == 1


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
    assert len(entry._events) == 0


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


async def test_what_nobody_reads_is_bounded():
    told: list[Entry] = []
    entry = Entry(make_request(), told.append, max_unread_bytes=100_000)
    for number in range(10_000):
        entry.put(token(str(number)))
    assert told == [entry]
    assert len(entry._events) <= 100_000 / 256 + 64
    unread = len(entry._events) - 1
    read = [await entry.next_event() for _ in range(unread)]
    assert [event.token.text for event in read] == [str(number) for number in range(unread)]
    last = await entry.next_event()
    assert isinstance(last, Failed) and "too slowly" in str(last.error)
    with pytest.raises(RuntimeError):
        await entry.next_event()


async def test_a_few_large_tokens_count_by_their_size():
    entry = Entry(make_request(), max_unread_bytes=100_000)
    for _ in range(128):
        entry.put(TokenGenerated(Token(1, "a", -0.5), (Token(2, "x" * 400, -0.5),) * 5))
    assert entry.closed and len(entry._events) == 65


async def test_a_reader_that_keeps_up_reads_without_bound():
    entry = Entry(make_request(), max_unread_bytes=1000)
    for number in range(2000):
        entry.put(token(str(number)))
        assert (await entry.next_event()).token.text == str(number)
    assert not entry.closed


async def test_a_cut_request_hears_why_and_nothing_more():
    told: list[Entry] = []
    entry = Entry(make_request(), told.append)
    waiting = asyncio.create_task(entry.next_event())
    await asyncio.sleep(0)
    entry.cut(UnhealthyError())
    entry.cut(UnhealthyError())
    entry.put(token("late"))
    last = await waiting
    assert isinstance(last, Failed) and isinstance(last.error, UnhealthyError)
    assert told == [entry] and len(entry._events) == 0


async def test_a_deadline_cuts():
    entry = Entry(make_request())
    entry.end_after(0.01, lambda entry: UnhealthyError())
    assert isinstance(await asyncio.wait_for(entry.next_event(), 20), Failed) and entry.closed


async def test_the_deadline_is_forgotten_with_its_request():
    entry, ended = Entry(make_request()), Entry(make_request())
    for one in (entry, ended):
        one.end_after(0.01, lambda entry: UnhealthyError())
    entry.close()
    ended.put(Failed(ValueError()))
    await asyncio.sleep(0.05)
    assert (len(entry._events), len(ended._events)) == (0, 1)
