"""A queued request and its outbox: `next_event` and `close` for HTTP, `put` for the scheduler.

A deque and one future instead of queues, for thousands of tokens a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from router.errors import GenerationError, RouterError
from router.events import Event, Failed, Finished, Predicted, TokenGenerated
from router.request import ValidRequest
from router.scheduling.cache.blocks import Allocation
from wire.text.counting import counted

log = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 1 << 20
# What one token occupies besides its text, roughly: two objects, two numbers, the heads of its strings.
_TOKEN_BYTES = 256
_LOOK_EVERY = 64


class Entry:
    """A request from `Scheduler.submit` to its last event.

    `next_event` ends with one `Finished` or `Failed`. `close`, idempotent, ends delivery and frees what it holds.
    Unread bytes are bounded.
    """

    __slots__ = (
        "_deadline",
        "_events",
        "_loop",
        "_max_unread_bytes",
        "_on_close",
        "_waiter",
        "allocation",
        "cached_tokens",
        "chunk_len",
        "closed",
        "done",
        "dropped_as",
        "generated_ids",
        "num_known",
        "num_preemptions",
        "predicted",
        "prefilled",
        "queued_at",
        "request",
        "request_id",
        "started_at",
    )

    def __init__(
        self,
        request: ValidRequest,
        on_close: Callable[[Entry], None] | None = None,
        *,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        self.request = request
        self.queued_at = time.monotonic()
        self.started_at: float | None = None  # when it was first taken into a batch
        self.cached_tokens = 0  # of the prompt, which the prefix cache had when it was first taken
        self.predicted = Predicted() if request.prediction_ids else None  # `delivery.keep_predicted` adds to it
        self.num_known = 0  # of the prompt, which the prefix cache had when it was queued, where replicas compare that
        self.closed = False  # the caller has disconnected
        # How its end is counted if its caller stops reading before; None: not at all.
        self.dropped_as: Literal["dropped", "generation"] | None = "dropped"
        self.done = False  # its end is settled: finished, failed or dropped
        # Read by the scheduler, written by the methods below under "What the scheduler does with it".
        self.request_id = -1  # given when it is appended to the queue
        self.allocation: Allocation | None = None
        self.chunk_len: int | None = None  # prompt tokens of its first Prefill, if that takes only a part
        self.prefilled = False  # its prompt's KV has been written: it has got a token since it was taken into a batch
        self.generated_ids: list[int] = []  # `delivery.keep_ids` adds to it: for the prefix cache and preemption
        self.num_preemptions = 0
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the reader's; asking for it is a system call
        self._on_close = on_close
        self._max_unread_bytes = max_unread_bytes
        self._deadline: asyncio.TimerHandle | None = None

    async def next_event(self) -> Event:
        """Wait for the next event; one reader."""
        while not self._events:
            if self.closed or self.done:
                raise RuntimeError("no event follows the last one, nor close()")
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft()

    def put(self, event: Event) -> None:
        """Deliver an event, unless closed or ended."""
        if self.closed or self.done:
            return
        if isinstance(event, Finished | Failed):
            self.done = True
        self._events.append(event)
        # A look costs as much as there is unread; a reader that keeps up has next to nothing, and pays nothing.
        if len(self._events) % _LOOK_EVERY == 0 and not self.done and self._unread_bytes() > self._max_unread_bytes:
            unread = counted(len(self._events), "token")
            log.warning("request %d ends: its client has not read %s", self.request_id, unread)
            self.cut(GenerationError("the client reads too slowly"))
            return
        self._wake()

    def close(self) -> None:
        """The caller has disconnected."""
        if self._deadline is not None:
            self._deadline.cancel()
        if not self.closed:
            self._events.clear()
            self._abandon()

    def answered(self, event: TokenGenerated, num_tokens: int) -> Finished:
        """End at a stop text's token; `close` follows."""
        self.dropped_as = None
        sampling = self.request.sampling
        return Finished(
            token=event.token,
            top_tokens=event.top_tokens,
            text="",
            generated_tokens=num_tokens,
            finish_reason="stop_sequence",
            seed=sampling.seed if sampling.do_sample else None,
            queued_at=self.queued_at,
            started_at=self.queued_at if self.started_at is None else self.started_at,
            cached_tokens=self.cached_tokens,
            predicted=self.predicted,
            step_tokens=0,
        )

    def withdraw(self) -> None:
        """Count no end: what it is a part of has failed elsewhere. `close` follows."""
        self.dropped_as = None

    def cut(self, error: RouterError) -> None:
        """End early: the reader gets `error` after what is unread."""
        if not self.closed and not self.done:
            self._events.append(Failed(error))
            self._abandon()

    def end_after(self, seconds: float, error: Callable[[Entry], RouterError]) -> None:
        """Let it expire after `seconds`."""
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.expire, error)

    def expire(self, error: Callable[[Entry], RouterError]) -> None:
        """Cut it with `error`'s result: its time is over."""
        found = error(self)
        # A refusal is counted where it is answered.
        self.dropped_as = "generation" if isinstance(found, GenerationError) else None
        self.cut(found)

    def _abandon(self) -> None:
        self.closed = True
        self._wake()
        if self._on_close is not None:
            self._on_close(self)

    def _unread_bytes(self) -> int:
        """Estimate unread tokens' bytes."""
        size = 0
        for event in self._events:
            if isinstance(event, TokenGenerated):
                size += _TOKEN_BYTES + len(event.token.text)
                size += sum(_TOKEN_BYTES + len(token.text) for token in event.top_tokens)
        return size

    # What the scheduler does with it.

    def queued(self, request_id: int) -> None:
        self.request_id = request_id

    def admit(self, allocation: Allocation, *, chunk_len: int | None = None) -> None:
        """Take blocks for its next Prefill of `chunk_len` tokens; None: all."""
        self.allocation, self.chunk_len = allocation, chunk_len

    def started(self, at: float) -> None:
        """Note its first Prefill, by `time.monotonic()`."""
        if self.started_at is None:
            self.started_at = at
            if self.allocation is not None:
                self.cached_tokens = self.allocation.prefix_length

    def first_token(self) -> None:
        """Note the first token in a batch, whose KV is unwritten."""
        self.prefilled = True

    def release(self) -> None:
        """Give its blocks to another."""
        self.allocation = self.chunk_len = None

    def preempted(self) -> None:
        """Note a lost place: all tokens are computed again."""
        self.prefilled = False
        self.num_preemptions += 1

    def drop(self) -> None:
        """End undelivered: its caller does not read."""
        self.done = True

    @property
    def num_tokens(self) -> int:
        """Count known tokens, which a Prefill must cache."""
        return self.request.input_length + len(self.generated_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and known generated tokens."""
        ids = self.request.input_ids
        return (*ids, *self.generated_ids) if self.generated_ids else ids

    @property
    def written_ids(self) -> Sequence[int]:
        """Return tokens with written KV, all except the newest step's."""
        if not self.prefilled:
            return ()
        return self.token_ids[: self.num_tokens - bool(self.generated_ids)]

    @property
    def most_positions(self) -> int:
        """Bound its KV positions; the last token is unwritten."""
        return self.request.input_length + self.request.stopping.max_new_tokens - 1

    @property
    def num_to_compute(self) -> int:
        """Count what its Prefill and chunks cache."""
        return self.num_tokens - (self.allocation.prefix_length if self.allocation is not None else 0)

    @property
    def num_remaining(self) -> int:
        """Tokens that it may still generate."""
        return self.request.stopping.max_new_tokens - len(self.generated_ids)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
