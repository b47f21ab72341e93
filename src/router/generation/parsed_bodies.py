"""Bounds bodies of many objects on their way to the queue.

Parsed they take fifty times their memory, and garbage collection of a hundred would hold up the event loop for half a
second.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from router.errors import OverloadedError
from router.worker.lane import MAX_WAITING_COST, RETRY_AFTER_S

_NUM_AT_ONCE = 2  # one is parsed while the template of another is rendered


class ParsedBodies:
    """Places for them, with a line."""

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_COST) -> None:
        self._places = asyncio.Semaphore(_NUM_AT_ONCE)
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0

    async def enter(self, num_bytes: int) -> None:
        """Take a place until `release`, for a body of `num_bytes`."""
        if self._waiting_bytes and self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise OverloadedError(RETRY_AFTER_S)
        self._waiting_bytes += num_bytes
        try:
            await self._places.acquire()
        finally:
            self._waiting_bytes -= num_bytes
        _current.set(_Place(self._places))


class _Place:
    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places = places
        self._is_held = True

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._places.release()


_current: ContextVar[_Place | None] = ContextVar("parsed_body", default=None)


def release() -> None:
    """Give back the request's place: its body is not needed any more."""
    if (place := _current.get()) is not None:
        place.release()
