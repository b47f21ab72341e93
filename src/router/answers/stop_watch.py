"""Ends a generation at stop texts only its reader recognizes."""

from __future__ import annotations

from router.answers.reading import ChoiceReader
from router.events import Finished, Prefilled
from router.generation.running import Item, Running
from router.generation.timings import Timings
from router.request import ValidRequest


class StopWatch:
    """Reads like `Running`; later computed tokens are dropped."""

    def __init__(self, running: Running, reader: ChoiceReader) -> None:
        """`reader`: of this answer, for nothing else."""
        self._running = running
        self._reader = reader
        self._num_tokens = 0

    @property
    def request(self) -> ValidRequest:
        return self._running.request

    @property
    def request_id(self) -> str:
        return self._running.request_id

    @property
    def timings(self) -> Timings | None:
        return self._running.timings

    async def next_event(self) -> Item:
        event = await self._running.next_event()
        if isinstance(event, Prefilled | Finished):
            return event
        self._num_tokens += 1
        self._reader.push(event.token)
        return event if self._reader.stop is None else self._running.stop(event, self._num_tokens)

    def close(self, *, is_dropped: bool = True) -> None:
        self._running.close(is_dropped=is_dropped)
