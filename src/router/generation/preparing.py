"""Requests before the scheduler: images, grammars, tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from router.errors import UnhealthyError

T = TypeVar("T")


class Preparing:
    """Their work, which ends without a scheduler."""

    def __init__(self) -> None:
        self._has_ended = False
        self._deadlines: set[asyncio.Timeout] = set()

    async def of(self, work: Coroutine[Any, Any, T]) -> T:
        """Return `work`'s result, or raise UnhealthyError after `end`."""
        deadline = asyncio.timeout(0 if self._has_ended else None)
        self._deadlines.add(deadline)
        try:
            async with deadline:
                return await work
        except TimeoutError:
            if deadline.expired():
                raise UnhealthyError from None
            raise
        finally:
            self._deadlines.discard(deadline)

    def end(self) -> None:
        """End all, present and future."""
        self._has_ended = True
        for deadline in self._deadlines:
            deadline.reschedule(0)
