"""Is the server able to generate? One question at a time, however many ask."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from router.shards.interface import ShardError, Shards


class Probe:
    """A generation of one token through the same numbered order as everything else, sent at the next boundary."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[bool] | None = None
        self._is_sent = False

    def ask(self) -> asyncio.Future[bool]:
        """The future answer of a probe; all who ask before it is there share one."""
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
            self._is_sent = False
        return self._answer

    def take(self) -> bool:
        """Whether a probe is to be sent now; its sender takes it."""
        is_due = self._answer is not None and not self._is_sent
        self._is_sent = True
        return is_due

    def answered(self, healthy: bool) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(healthy)
        self._answer = None


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
