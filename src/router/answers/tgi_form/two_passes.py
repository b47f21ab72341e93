"""TGI's two passes: the model decides on a call, else answers; under one permit, read as one generation."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

from router.answers.tgi_form.call_parser import ToolCallParser
from router.answers.tgi_form.tool_schema import NO_TOOL
from router.events import Finished, Prefilled
from router.generation.permits import HeldPermits, PermitPool
from router.generation.running import Item, Run, Running
from router.generation.timings import Timings
from router.request import ValidRequest

Start = Callable[[HeldPermits], Awaitable[Run]]


class TwoPasses:
    """Reads like `Running`, from the decision on."""

    def __init__(self, decision: Running, answer: Start, permits: HeldPermits) -> None:
        """Take the decision under the tool grammar, and what starts the answer."""
        self._decision = decision
        self._running: Run = decision
        self._answer = answer
        self._parser = ToolCallParser()
        self._seen: deque[Item] = deque()
        self._is_decided = False
        self._closed = False
        self._held = permits
        self._pool = permits.hand_over()

    @property
    def request(self) -> ValidRequest:
        """Return the request the client gets, as known."""
        return self._running.request

    @property
    def request_id(self) -> str:
        return self._running.request_id

    @property
    def timings(self) -> Timings | None:
        return self._running.timings

    async def next_event(self) -> Item:
        try:
            while not self._is_decided:
                await self._decide()
            event = self._seen.popleft() if self._seen else await self._running.next_event()
        except BaseException:
            self.close()
            raise
        if isinstance(event, Finished):
            self.close()
        return event

    def close(self, *, is_dropped: bool = True) -> None:
        """Close; no second pass follows."""
        if not self._closed:
            self._closed = True
            self._running.close(is_dropped=is_dropped)
            self._pool.give_back(1)

    async def _decide(self) -> None:
        event = await self._running.next_event()
        self._seen.append(event)
        if isinstance(event, Prefilled):
            return
        if not event.token.special:
            self._parser.feed(event.token.text)
        name = self._parser.name
        if name is not None and name != NO_TOOL:
            self._is_decided = True
            self._decision.keep()
        elif isinstance(event, Finished):
            # It calls nothing, or its tokens ended before it had named a function: the answer is text.
            self._seen.clear()
            self._running = await self._answer(permits_of_one_pass(self._held, before=self._decision.timings))
            self._is_decided = True


def permits_of_one_pass(permits: HeldPermits, *, before: Timings | None = None) -> HeldPermits:
    """Return a private permit; the counted one is held to the end.

    Args:
        before: What the decision took; None: it is for the decision.
    """
    pool = PermitPool(1)
    pool.acquire(1)
    one = HeldPermits(pool, 1, permits.request_id, permits.request_span)
    one.arrived_at, one.number = permits.arrived_at, permits.number
    one.is_decision, one.before = before is None, before
    return one
