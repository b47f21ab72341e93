"""Names are looked up apart from everything else, within a limit, one lookup at a time for each."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from router.errors import OverloadedError
from router.images.fetch.resolver import Resolver


class SlowNames:
    """Hosts whose name begins with `slow` are answered after `answer`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer = threading.Event()

    def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked.append(host)
        if host.startswith("slow"):
            self.answer.wait(60)
        if host == "unknown":
            raise socket.gaierror("unknown")
        return [(0, 0, 0, "", ("8.8.8.8", port)), (0, 0, 0, "", ("8.8.8.8", port)), (0, 0, 0, "", ("8.8.4.4", port))]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowNames]:
    one = SlowNames()
    monkeypatch.setattr(socket, "getaddrinfo", one.getaddrinfo)
    yield one
    one.answer.set()


async def test_slow_names_have_a_limit_and_hold_up_no_others(names: SlowNames) -> None:
    resolver = Resolver(limit_s=0.05, max_at_once=2)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await resolver.resolve("slow", 80)
    assert names.asked == ["slow"]  # still under way, and nothing else is started for it
    assert await Resolver(max_at_once=1).resolve("quick", 80) == ["8.8.8.8", "8.8.4.4"]
    with pytest.raises(TimeoutError):
        await resolver.resolve("slow2", 80)
    with pytest.raises(OverloadedError):
        await resolver.resolve("quick", 80)
    names.answer.set()
    while resolver._running:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert await Resolver(max_at_once=2).resolve("slow", 80) == ["8.8.8.8", "8.8.4.4"]


async def test_a_lookup_is_shared_and_its_answer_is_not_kept(names: SlowNames) -> None:
    resolver = Resolver(limit_s=60)
    both = asyncio.gather(resolver.resolve("slow", 80), resolver.resolve("slow", 80))
    await asyncio.sleep(0)
    names.answer.set()
    assert await both == [["8.8.8.8", "8.8.4.4"]] * 2 and names.asked == ["slow"]
    await resolver.resolve("slow", 80)
    assert names.asked == ["slow", "slow"]
    with pytest.raises(OSError, match="unknown"):
        await resolver.resolve("unknown", 80)


async def test_a_lookup_that_gets_no_thread_is_not_waited_for(
    names: SlowNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver = Resolver(max_at_once=1)
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", start)
        with pytest.raises(OverloadedError):
            await resolver.resolve("quick", 80)
    assert await resolver.resolve("quick", 80) == ["8.8.8.8", "8.8.4.4"]
