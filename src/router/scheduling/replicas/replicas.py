"""Chooses a replica for each request, and does without those that have failed until they are back.

A prompt goes where the least is to be done for it: its own tokens that the replica's prefix cache does not have, what
waits there, and a step's share of what runs there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from router.errors import BackendError, RouterError, UnhealthyError
from router.metrics import Metrics
from router.request import ValidRequest
from router.scheduling.entry import Entry
from router.scheduling.loop import Scheduler
from router.scheduling.replicas.entry import MovingEntry
from router.scheduling.replicas.gauges import Gauges
from wire.cli.replica_options import ReplicaPolicy

log = logging.getLogger(__name__)

_TOKENS_OF_A_ROW = 16
"""What a running request counts like, in tokens of a prompt."""
_RETRY_S = 1.0


class ReplicaShards(Protocol):
    """A replica's connection."""

    async def close(self) -> None: ...


Served = tuple[Scheduler, ReplicaShards]
Connect = Callable[[int], Awaitable[Served]]


class Replica:
    """One of them, with the scheduler of its last start."""

    def __init__(self, number: int, served: Served) -> None:
        self.number = number
        self.scheduler, self.shards = served
        self.is_ready = True

    @property
    def has_failed(self) -> bool:
        return self.scheduler.failure is not None or not self.is_ready

    @property
    def busy(self) -> int:
        """What is to be done before and beside a new request, in tokens of a prompt."""
        return self.scheduler.num_waiting_tokens + self.scheduler.num_running * _TOKENS_OF_A_ROW


class Replicas:
    """What requests see as one scheduler."""

    def __init__(
        self, served: Sequence[Served], connect: Connect, metrics: Metrics, gauges: Gauges, policy: ReplicaPolicy
    ) -> None:
        """Take replicas that are warm.

        Args:
            connect: Connects to the shards of a replica that has failed, once they are there again, and warms them up.
        """
        self.failure: Exception | None = None
        self._replicas = [Replica(number, each) for number, each in enumerate(served)]
        self._connect, self._metrics, self._gauges, self._policy = connect, metrics, gauges, policy
        self._turn = 0
        self._is_draining = self._is_closed = False
        self._count()

    # What one scheduler has, too

    def submit(self, request: ValidRequest) -> MovingEntry:
        """Queue a request where it is done the soonest. Raises what `Scheduler.submit` does."""
        return MovingEntry(request, self._submit)

    @property
    def adapters_in_use(self) -> tuple[set[str], set[str]]:
        running, queued = zip(*(one.scheduler.adapters_in_use for one in self._ready), strict=True)
        return set().union(*running), set().union(*queued)

    @property
    def queued_by_key(self) -> Mapping[str, int]:
        counts: Counter[str] = Counter()
        for one in self._ready:
            counts.update(one.scheduler.queued_by_key)
        return counts

    @property
    def most_adapters(self) -> int | None:
        return self._replicas[0].scheduler.most_adapters

    @property
    def estimated_wait_s(self) -> float:
        return min((one.scheduler.estimated_wait_s for one in self._ready), default=_RETRY_S)

    def most_new_tokens(self, input_length: int, num_images: int = 0) -> int:
        """Return the most tokens that every replica has room for."""
        return min(one.scheduler.most_new_tokens(input_length, num_images) for one in self._replicas)

    async def check_health(self) -> bool:
        """Whether a replica answers and generates."""
        found = await asyncio.gather(*(one.scheduler.check_health() for one in self._ready))
        return any(found)

    async def end_if_unreachable(self) -> None:
        """Fail replicas whose shards are gone."""
        await asyncio.gather(*(one.scheduler.end_if_unreachable() for one in self._ready))

    async def run(self) -> None:
        """Serve until closed, or until no replica is left."""
        running = [asyncio.ensure_future(self._run(one)) for one in self._replicas]
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self.close()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def close(self) -> None:
        """End at once."""
        self._is_closed = True
        await asyncio.gather(*(one.scheduler.close() for one in self._replicas))

    async def close_shards(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(one.shards.close() for one in self._replicas))

    # Inside

    @property
    def _ready(self) -> list[Replica]:
        return [one for one in self._replicas if not one.has_failed]

    def _submit(self, request: ValidRequest, known_ids: Sequence[int] = ()) -> tuple[Entry, Replica]:
        ready = self._ready
        if not ready:
            raise UnhealthyError
        chosen, num_known = self._chosen(request, ready)
        entry = chosen.scheduler.submit(request, known_ids)
        entry.num_known = num_known
        return entry, chosen

    def _chosen(self, request: ValidRequest, ready: Sequence[Replica]) -> tuple[Replica, int]:
        """Return a replica, and how many of the prompt's tokens its prefix cache has."""
        self._turn += 1
        # Of equal ones the next in turn: cold prompts are spread.
        in_turn = [ready[(self._turn + number) % len(ready)] for number in range(len(ready))]
        if self._policy == "prefix":
            known = [(one, one.scheduler.num_known(request)) for one in in_turn]
            return min(known, key=lambda pair: pair[0].busy - pair[1])
        chosen = in_turn[0] if self._policy == "round_robin" else min(in_turn, key=lambda one: one.busy)
        return chosen, chosen.scheduler.num_known(request)

    async def _run(self, one: Replica) -> None:
        """Run a replica's schedulers, one after the other; return when the router is to end."""
        while True:
            await one.scheduler.run()
            failure = one.scheduler.failure
            if self._is_closed or failure is None:
                return
            one.is_ready = False
            self._gauges.forget(one.number)
            self._count()
            if not self._ready:
                self.failure = failure
                return
            log.error("replica %d has failed, %d others serve: %s", one.number, len(self._ready), failure)
            await one.shards.close()
            one.scheduler, one.shards = await self._connected(one.number)
            one.is_ready = True
            self._count()
            log.info("replica %d serves again", one.number)

    async def _connected(self, number: int) -> Served:
        while True:
            await asyncio.sleep(_RETRY_S)
            try:
                return await self._connect(number)
            except (RouterError, BackendError, OSError) as error:
                log.debug("replica %d is not back: %s", number, error)

    def _count(self) -> None:
        num_ready = len(self._ready)
        self._metrics.gauge("tgi_replicas", num_ready, state="ready")
        self._metrics.gauge("tgi_replicas", len(self._replicas) - num_ready, state="failed")
