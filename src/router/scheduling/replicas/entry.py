"""A request that continues elsewhere if its replica fails, from the tokens that its reader has got.

It is computed again as a preempted one is: random numbers, stop texts and grammars follow from the tokens before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from router.errors import RouterError
from router.events import Event, Failed, Finished, TokenGenerated
from router.request import ValidRequest
from router.scheduling.entry import Entry

_MOST_MOVES = 3


class Place(Protocol):
    """The replica that has a request."""

    @property
    def has_failed(self) -> bool: ...


class Submit(Protocol):
    """Choose a replica and queue there. Raises what `Scheduler.submit` does."""

    def __call__(self, request: ValidRequest, known_ids: Sequence[int] = ()) -> tuple[Entry, Place]: ...


class MovingEntry:
    """A request's entry, whichever replica has it."""

    def __init__(self, request: ValidRequest, submit: Submit) -> None:
        self._request, self._submit = request, submit
        self._entry, self._place = submit(request)
        self._num_moves = 0
        self._ids: list[int] = []  # what its reader has got

    async def next_event(self) -> Event:
        """Wait for the next event; one reader."""
        while True:
            event = await self._entry.next_event()
            if isinstance(event, TokenGenerated):
                self._ids.append(event.token.id)
            elif isinstance(event, Finished) and self._num_moves:
                return replace(event, cached_tokens=min(event.cached_tokens, self._request.input_length))
            elif isinstance(event, Failed) and self._may_move:
                self._num_moves += 1
                self._entry.close()
                try:
                    self._entry, self._place = self._submit(self._request, self._ids)
                except RouterError:
                    return event
                continue
            return event

    @property
    def _may_move(self) -> bool:
        # Log probabilities of a prompt come once.
        return (
            self._place.has_failed
            and self._num_moves < _MOST_MOVES
            and not (self._ids and self._request.decoder_input_details)
        )

    def close(self) -> None:
        """The caller has disconnected."""
        self._entry.close()

    def withdraw(self) -> None:
        """Count no end."""
        self._entry.withdraw()

    def answered(self, event: TokenGenerated, num_tokens: int) -> Finished:
        """End at a stop text's token."""
        return self._entry.answered(event, num_tokens)
