"""Asks children that are stuck what their threads are doing, and writes their answers to the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

from launcher.processes.child import Child
from launcher.processes.child_logs import texts_of

logger = logging.getLogger("text_generation_launcher")

_LIMIT_S = 5.0
_QUIET_S = 0.2
"""An answer is complete when nothing more of it has come for this time: it is written in one go."""
_POLL_S = 0.02


def show(children: Sequence[Child]) -> Iterator[float]:
    """Log the stacks of each child, or why there are none; yields the seconds to wait for their answers."""
    asked = [_Asked(child) for child in children if child.poll() is None]
    deadline = time.monotonic() + _LIMIT_S
    while not all(one.is_answered() for one in asked) and time.monotonic() < deadline:
        yield _POLL_S
    for one in asked:
        one.report()


class _Asked:
    """One child that was asked."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._before = self._seen = child.logs.errors.num_added
        self._changed_at = time.monotonic()
        child.ask_for_stacks()

    def is_answered(self) -> bool:
        """Also if there can be no answer."""
        now, number = time.monotonic(), self._child.logs.errors.num_added
        if number != self._seen:
            self._seen, self._changed_at = number, now
        if number == self._before:
            return self._child.state[:1] in ("", "T", "t", "Z")
        return now - self._changed_at > _QUIET_S

    def report(self) -> None:
        child, lines = self._child, self._child.logs.errors.since(self._before)
        extra = {} if child.command.rank is None else {"rank": child.command.rank}
        if not lines:
            state = child.state or "gone"
            logger.error("No stacks of %s (%s): its state is %s", child.title, child.logs.progress, state, extra=extra)
        for index, text in enumerate(texts_of(lines)):
            head = f"Stacks of {child.title} ({child.logs.progress}):" if not index else "..."
            logger.error("%s\n%s", head, text, extra=extra)
