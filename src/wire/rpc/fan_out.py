"""Awaits one call to every rank."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any


async def gathered(answers: Sequence[Awaitable[Any]], ends_at: Callable[[BaseException], bool]) -> list[Any]:
    """Return all ranks' answers in order.

    A failure with `ends_at` is raised at once: others may wait for that rank. Others wait for all answers, so that
    ranks are in a known state.
    """
    if len(answers) == 1:
        return [await answers[0]]
    tasks = [asyncio.ensure_future(answer) for answer in answers]
    pending: set[asyncio.Future[Any]] = set(tasks)
    failure: BaseException | None = None
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    continue
                if ends_at(error):
                    raise error
                failure = failure or error
    finally:
        for task in pending:
            task.add_done_callback(_swallow)
            task.cancel()
    if failure is not None:
        raise failure
    return [task.result() for task in tasks]


def _swallow(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()
