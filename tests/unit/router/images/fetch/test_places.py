"""Places of fetches: a host that is slow holds up its own files only."""

from __future__ import annotations

import asyncio

import pytest

from router.errors import OverloadedError
from router.images.fetch.places import FetchPlaces


async def held(places: FetchPlaces, host: str) -> tuple[asyncio.Task[None], asyncio.Event]:
    """A task that has a place until the event."""
    inside, may_end = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with places.of(host):
            inside.set()
            await may_end.wait()

    task = asyncio.create_task(hold())
    await inside.wait()
    return task, may_end


async def test_a_host_has_only_its_own_places() -> None:
    places = FetchPlaces(in_all=3, of_a_host=2, wait_s=60)
    slow = [await held(places, "slow") for _ in range(2)]
    third = asyncio.create_task(held(places, "slow"))
    for _ in range(3):
        async with places.of("other"):
            assert not third.done()
    slow[0][1].set()
    slow.append(await third)
    for task, may_end in slow:
        may_end.set()
        await task
    assert not places._hosts


async def test_a_wait_has_an_end_and_is_no_fault_of_the_host() -> None:
    places = FetchPlaces(in_all=2, of_a_host=2, wait_s=0.05)
    holders = [await held(places, host) for host in ("a", "b")]
    for host in ("a", "c"):
        with pytest.raises(OverloadedError):
            async with places.of(host):
                raise AssertionError
    waiting = asyncio.create_task(places.of("d").__aenter__())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for task, may_end in holders:
        may_end.set()
        await task
    async with places.of("c"):
        assert set(places._hosts) == {"c"}
    with pytest.raises(TimeoutError):
        async with places.of("c"), asyncio.timeout(0):
            await asyncio.sleep(60)
    assert not places._hosts
