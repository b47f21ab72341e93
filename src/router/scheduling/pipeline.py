"""Calls in flight, in the order in which they were sent, and blocks that wait for them.

The shards execute in that order, so answers are awaited in that order too: the oldest first.
"""

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
    """One call to all shards. `batch` is the one whose rows it runs, `batch_ids` are the ids that it names; `step`: the
    `num_steps` that a Prefill or Decode brought its batch to."""

    kind: CallKind
    reply: asyncio.Future[Any]
    batch: RunningBatch | None
    batch_ids: tuple[int, ...]
    step: int = 0
    sent_at: float = field(default_factory=time.monotonic)
    could_begin_at: float = 0.0  # known when it is answered: sent, and all calls before it answered


class Pipeline:
    """Calls in flight and the blocks of ended requests.

    A call in flight may still write the KV of a request that has ended meanwhile. So its blocks go back to the
    allocator only when every call that was in flight at its end has been answered.
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
        """The oldest call, once its answer (or failure) is there. Raises `StalledError` if that takes too long."""
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
        """Whether calls are in flight and none has been answered for more than `limit_s` seconds."""
        return bool(self._calls) and time.monotonic() - self._oldest_could_begin_at > limit_s

    def retire(self, entry: Entry) -> None:
        """The request has ended: its blocks become free as soon as nothing in flight can write them."""
        if entry.allocation is None:
            return
        written_ids, allocation = entry.written_ids, entry.allocation
        entry.release()
        self._retired.append((self._num_sent, allocation, written_ids))
        self._free_retired()

    def abandon(self) -> None:
        """Nothing is sent any more: forget the calls, free everything retired."""
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
    """Returns when the reply is there, or when the time is up. A quarter of what `asyncio.wait` costs at every step."""
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
