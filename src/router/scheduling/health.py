"""Is the server able to generate? One question at a time, however many ask."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from router.shards.interface import ShardError, Shards


class HealthCheck:
    """TGI's two-step rule: while generations succeed, ask the devices; after one has failed, generate a token.

    probe: generates one token and says whether that worked. num_failures: how many generations have failed so far.
    """

    def __init__(self, shards: Shards, probe: Callable[[], Awaitable[bool]], num_failures: Callable[[], int]) -> None:
        self._shards = shards
        self._probe = probe
        self._num_failures = num_failures
        self._forgiven = 0  # failures that a later success has made good
        self._healthy = True  # the warm-up has just proved it
        self._asking: asyncio.Task[bool] | None = None

    async def ask(self) -> bool:
        """Joins the question that is already being asked, so a flood of probes costs one."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> bool:
        num_failures = self._num_failures()
        if self._healthy and num_failures == self._forgiven:
            self._healthy = await self._devices_answer()
        else:
            self._healthy = await self._probe()
            if self._healthy:
                self._forgiven = num_failures  # not what failed while the probe ran
        return self._healthy

    async def _devices_answer(self) -> bool:
        try:
            await self._shards.health()
        except ShardError:
            return False
        return True
