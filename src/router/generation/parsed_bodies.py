"""How many bodies of many objects may be on their way to the queue at once.

What such a body is parsed into takes up to fifty times its memory, and the garbage collector goes through all of it
while nothing else runs: a hundred chats of ten thousand messages would hold up the event loop for half a second.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

_NUM_AT_ONCE = 2  # one is parsed while the template of another is rendered


class ParsedBodies:
    """Places for them; who finds none waits in line."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(_NUM_AT_ONCE)

    async def enter(self) -> None:
        """Takes a place for the request that is being answered, until `leave`."""
        await self._places.acquire()
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
