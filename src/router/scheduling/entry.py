"""A queued request and its outbox.

The HTTP side holds the reading end (`next_event`, `close`), the scheduler the writing end (`put`). There is no queue
object per token: a deque and at most one future, because a busy server delivers thousands of tokens a second.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from router.events import Event, Failed, Finished
from router.request import ValidRequest

if TYPE_CHECKING:
    from router.scheduling.batch import RunningBatch
    from router.scheduling.blocks import Allocation


class Entry:
    """One request from `Scheduler.submit` to its last event.

    Reader's contract: `next_event` yields events.py's sequence, ending with exactly one `Finished` or `Failed`, after
    which it must not be called again. `close` says that nobody reads any more: nothing is delivered from then on, and
    whatever the request holds is freed in due course. `close` is idempotent and harmless after the last event.
    """

    __slots__ = (
        "_events",
        "_on_close",
        "_waiter",
        "allocation",
        "batch",
        "chunk_len",
        "closed",
        "done",
        "generated_ids",
        "num_positions",
        "num_preemptions",
        "prefilled",
        "queued_at",
        "request",
        "request_id",
        "started_at",
    )

    def __init__(self, request: ValidRequest, on_close: Callable[[Entry], None] | None = None) -> None:
        self.request = request
        self.queued_at = time.monotonic()
        self.started_at: float | None = None  # when it was first taken into a batch
        self.closed = False  # the caller has left
        self.done = False  # its end is settled: finished, failed or dropped
        # Written by the scheduler only.
        self.request_id = -1  # given when it is appended to the queue
        self.batch: RunningBatch | None = None
        self.allocation: Allocation | None = None
        self.chunk_len: int | None = None  # prompt tokens of its first Prefill, if that takes only a part
        self.prefilled = False  # its prompt's KV has been written: it has got a token since it was taken into a batch
        self.generated_ids: list[int] = []  # kept where they are wanted again: prefix cache, preemption
        self.num_positions = 0  # KV positions that the calls sent so far fill; kept while it may have to grow
        self.num_preemptions = 0
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._on_close = on_close

    async def next_event(self) -> Event:
        """The next event; waits for it. One reader at a time."""
        while not self._events:
            if self.closed or self.done:
                raise RuntimeError("no event follows the last one, nor close()")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft()

    def put(self, event: Event) -> None:
        """Deliver one event; dropped when the caller has left or the last event has been delivered."""
        if self.closed or self.done:
            return
        if isinstance(event, Finished | Failed):
            self.done = True
        self._events.append(event)
        self._wake()

    def close(self) -> None:
        """The caller has left."""
        if self.closed:
            return
        self.closed = True
        self._events.clear()
        self._wake()
        if self._on_close is not None:
            self._on_close(self)

    @property
    def num_tokens(self) -> int:
        """Prompt and known generated tokens: what a Prefill has to bring into the cache before the next token."""
        return self.request.input_length + len(self.generated_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and known generated tokens."""
        ids = self.request.input_ids
        return (*ids, *self.generated_ids) if self.generated_ids else ids

    @property
    def written_ids(self) -> Sequence[int]:
        """The tokens whose KV is certainly written: each one is by the step after the one that drew it."""
        if not self.prefilled:
            return ()
        return self.token_ids[: self.num_tokens - bool(self.generated_ids)]

    @property
    def num_remaining(self) -> int:
        """Tokens that it may still generate."""
        return self.request.stopping.max_new_tokens - len(self.generated_ids)

    @property
    def num_unread(self) -> int:
        """Events delivered but not read yet; what a slow reader costs."""
        return len(self._events)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
