"""Is the server able to generate? One question at a time, however many ask."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from router.shards.interface import ShardError, Shards


class HealthCheck:
    """TGI's two-step rule: while generations succeed, ask the devices; after one has failed, generate a token."""

    def __init__(self, shards: Shards, probe: Callable[[], Awaitable[bool]]) -> None:
        self._shards = shards
        self._probe = probe
        self._num_failures = 0
        self._suspicious = False
        self._asking: asyncio.Task[bool] | None = None

    def generation_failed(self) -> None:
        """The next question is answered by a real generation."""
        self._num_failures += 1
        self._suspicious = True

    async def ask(self) -> bool:
        """Joins the question that is already being asked, so a flood of probes costs one."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> bool:
        num_failures = self._num_failures
        healthy = await self._probe() if self._suspicious else await self._devices_answer()
        # A generation that failed meanwhile keeps the suspicion alive.
        self._suspicious = not healthy or num_failures != self._num_failures
        return healthy

    async def _devices_answer(self) -> bool:
        try:
            await self._shards.health()
        except ShardError:
            return False
        return True
