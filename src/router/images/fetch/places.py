"""Bounds fetches in all and by host, so that slow hosts hold up only their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.errors import OverloadedError

_RETRY_AFTER_S = 5


class FetchPlaces:
    """Places for fetches, with lines."""

    def __init__(self, *, in_all: int, of_a_host: int, wait_s: float) -> None:
        self._all = asyncio.Semaphore(in_all)
        self._of_a_host = of_a_host
        self._wait_s = wait_s
        self._hosts: dict[str, _Line] = {}

    @asynccontextmanager
    async def of(self, host: str) -> AsyncIterator[None]:
        """Hold a place for a host's fetch, if free in time."""
        line = self._hosts.get(host) or self._hosts.setdefault(host, _Line(self._of_a_host))
        line.num_users += 1
        try:
            async with asyncio.timeout(self._wait_s) as waiting:
                # The host's first: a fetch that waits for it holds no place that another host could have.
                async with line.places, self._all:
                    waiting.reschedule(None)
                    yield
        except TimeoutError:
            if waiting.expired():
                raise OverloadedError(_RETRY_AFTER_S) from None
            raise
        finally:
            line.num_users -= 1
            if not line.num_users:
                del self._hosts[host]


class _Line:
    """A host's line."""

    __slots__ = ("num_users", "places")

    def __init__(self, number: int) -> None:
        self.places = asyncio.Semaphore(number)
        self.num_users = 0
