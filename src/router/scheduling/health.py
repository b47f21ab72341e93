"""Can the server generate? One question at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from router.shards.interface import ShardError, Shards


class Probe:
    """A generation of one token in the usual order."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[bool] | None = None
        self._is_sent = False

    def ask(self) -> asyncio.Future[bool]:
        """Return the shared answer of a probe."""
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
            self._is_sent = False
        return self._answer

    def pop(self) -> bool:
        """Take a probe to be sent, if any."""
        is_due = self._answer is not None and not self._is_sent
        self._is_sent = True
        return is_due

    def answered(self, healthy: bool) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(healthy)
        self._answer = None


class HealthCheck:
    """TGI's rule: ask devices, after a failure generate."""

    def __init__(self, shards: Shards, probe: Callable[[], Awaitable[bool]], num_failures: Callable[[], int]) -> None:
        self._shards = shards
        # Generates a token; `num_failures`: of generations.
        self._probe = probe
        self._num_failures = num_failures
        self._forgiven = 0  # failures that a later success has made good
        self._healthy = True  # the warm-up has just proved it
        self._asking: asyncio.Task[bool] | None = None

    async def ask(self) -> bool:
        """Join the running question."""
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
