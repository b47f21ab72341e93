"""How many generations may run, and each request's permits."""

from __future__ import annotations

import time

from router.generation.timings import Timings
from router.tracing import RequestSpan


class PermitPool:
    """The limit of generations; permits are taken or refused."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_taken = 0

    def acquire(self, number: int) -> bool:
        if self.num_taken + number > self.limit:
            return False
        self.num_taken += number
        return True

    def give_back(self, number: int) -> None:
        self.num_taken -= number


class HeldPermits:
    """One request's permits; those not taken over go back at the end."""

    def __init__(self, pool: PermitPool, number: int, request_id: str, request_span: RequestSpan | None = None) -> None:
        self._pool = pool
        self.number = self._num_left = number
        self.request_id = request_id
        self.request_span = request_span
        self.arrived_at = time.monotonic()
        self.is_decision = False
        """Whether what it starts may turn out not to be the answer: it counts when it is known to be."""
        self.before: Timings | None = None
        """What the decision took that has led to what it starts."""

    def __enter__(self) -> HeldPermits:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.give_back(self._num_left)
        self._num_left = 0

    def hand_over(self) -> PermitPool:
        """Hand a permit to a holder who gives it back."""
        assert self._num_left > 0
        self._num_left -= 1
        return self._pool
