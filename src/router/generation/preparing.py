"""Requests that are not with the scheduler yet: their images are fetched, their grammars checked, their texts cut."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from router.errors import UnhealthyError

T = TypeVar("T")


class Preparing:
    """What they wait for, which is ended when no scheduler is left that could take them."""

    def __init__(self) -> None:
        self._has_ended = False
        self._deadlines: set[asyncio.Timeout] = set()

    async def of(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises UnhealthyError as soon as `end` is called, and at once after that."""
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
        """All of them now, and those that come."""
        self._has_ended = True
        for deadline in self._deadlines:
            deadline.reschedule(0)
