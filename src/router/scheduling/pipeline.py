"""Calls in flight, answered in order, and blocks that wait for them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from router.scheduling.batch import RunningBatch
from router.scheduling.cache.blocks import Allocation, BlockAllocator
from router.scheduling.entry import Entry
from router.shards.interface import StalledError

CallKind = Literal["prefill", "decode", "filter", "clear", "probe"]


@dataclass(slots=True)
class Call:
    """One call to all shards."""

    kind: CallKind
    reply: asyncio.Future[Any]
    # Whose rows it runs; `batch_ids`: named.
    batch: RunningBatch | None
    batch_ids: tuple[int, ...]
    # The batch's `num_steps` after it.
    step: int = 0
    sent_at: float = field(default_factory=time.monotonic)
    could_begin_at: float = 0.0  # known when it is answered: sent, and all calls before it answered


class Pipeline:
    """Calls in flight, and ended requests' blocks.

    Calls may still write an ended request's KV, so its blocks wait for all in flight then.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._calls: deque[Call] = deque()
        self._num_sent = 0
        self._num_answered = 0
        # (free when this number of calls is answered, what, the tokens that it holds)
        self._retired: deque[tuple[int, Allocation, Sequence[int]]] = deque()
        self._oldest_could_begin_at = 0.0

    def __len__(self) -> int:
        return len(self._calls)

    def append(self, call: Call) -> None:
        """A call was just sent."""
        if not self._calls:
            self._oldest_could_begin_at = call.sent_at
        self._calls.append(call)
        self._num_sent += 1
        if call.batch is not None:
            call.batch.call_sent(is_decode=call.kind == "decode")

    async def next_answered(self, limit_s: float) -> Call:
        """Wait for the oldest call.

        Raises:
            StalledError: It takes too long.
        """
        call = self._calls[0]
        if not call.reply.done():
            await _answered(call.reply, limit_s)
            if not call.reply.done():
                message = f"no step finished for {limit_s:g} s"
                raise StalledError(message, detail=f"{message} (--max-step-seconds); unanswered: {call.kind}")
        self._calls.popleft()
        self._num_answered += 1
        call.could_begin_at, self._oldest_could_begin_at = self._oldest_could_begin_at, time.monotonic()
        if call.batch is not None:
            call.batch.call_answered(is_decode=call.kind == "decode")
        self._free_retired()
        return call

    def is_stalled(self, limit_s: float) -> bool:
        """Whether calls wait longer than `limit_s`."""
        return bool(self._calls) and time.monotonic() - self._oldest_could_begin_at > limit_s

    def retire(self, entry: Entry) -> None:
        """Free a request's blocks once nothing can write them."""
        if entry.allocation is None:
            return
        written_ids, allocation = entry.written_ids, entry.allocation
        entry.release()
        self._retired.append((self._num_sent, allocation, written_ids))
        self._free_retired()

    def abandon(self) -> None:
        """Forget the calls, and free all."""
        for call in self._calls:
            call.reply.add_done_callback(_look)
            call.reply.cancel()
        self._calls.clear()
        self._num_answered = self._num_sent
        self._free_retired()

    def _free_retired(self) -> None:
        retired = self._retired
        while retired and retired[0][0] <= self._num_answered:
            _, allocation, written = retired.popleft()
            self._allocator.free(allocation, written)


async def _answered(reply: asyncio.Future[Any], limit_s: float) -> None:
    """Wait for the reply or limit, at a quarter of `asyncio.wait`'s cost."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    reply.add_done_callback(wake)
    timer = loop.call_later(limit_s, wake)
    try:
        await waiter
    finally:
        timer.cancel()
        reply.remove_done_callback(wake)


def _look(reply: asyncio.Future[Any]) -> None:
    if not reply.cancelled():
        reply.exception()  # retrieved, so that asyncio does not warn that it was not
