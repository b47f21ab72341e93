"""How many bodies of many objects may be on their way to the queue at once.

What such a body is parsed into takes up to fifty times its memory, and the garbage collector goes through all of it
while nothing else runs: a hundred chats of ten thousand messages would hold up the event loop for half a second.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from router.errors import OverloadedError
from router.worker.lane import MAX_WAITING_COST, RETRY_AFTER_S

_NUM_AT_ONCE = 2  # one is parsed while the template of another is rendered


class ParsedBodies:
    """Places for them; who finds none waits in line."""

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_COST) -> None:
        self._places = asyncio.Semaphore(_NUM_AT_ONCE)
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0

    async def enter(self, num_bytes: int) -> None:
        """Takes a place for the request that is being answered, until `leave`. `num_bytes`: of its body.

        Raises OverloadedError for what would wait behind too much.
        """
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

    def leave(self) -> None:
        if self._is_held:
            self._is_held = False
            self._places.release()


_current: ContextVar[_Place | None] = ContextVar("parsed_body", default=None)


def leave() -> None:
    """The request that is being answered has its prompt, or its answer: its body needs no place any more."""
    if (place := _current.get()) is not None:
        place.leave()
