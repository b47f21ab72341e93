"""Several generations of one request, as Vertex AI and KServe send."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request

from router.api.app_state import AppState, request_id_of
from router.api.http.disconnect import cancel_on_disconnect
from router.generation.asked import GenerateRequest
from router.generation.checks import check_best_of
from router.generation.collect import GenerationResult, collect_all, start_all
from router.generation.inference import Inference, mean_logprob
from router.generation.permits import HeldPermits
from router.generation.running import Run


@dataclass(frozen=True)
class BatchItem:
    """A generation, `number` times, and how the best becomes an answer; nothing runs before `start`."""

    start: Callable[[HeldPermits], Awaitable[Run]]
    answer_of: Callable[[GenerationResult], Any]
    number: int = 1


def item_of(inference: Inference, request: GenerateRequest, answer_of: Callable[[GenerationResult], str]) -> BatchItem:
    """`best_of` generations of a request."""
    return BatchItem(partial(inference.start, request), answer_of, request.best_of or 1)


async def answers_of(request: Request, state: AppState, items: Sequence[BatchItem]) -> list[Any]:
    """Return the items' answers in order; the first failure ends all."""
    inference = state.inference
    for item in items:
        check_best_of(item.number, inference.limits)
    with inference.take_permits(sum(item.number for item in items), request_id=request_id_of(request)) as permits:
        generations = iter(await cancel_on_disconnect(request.receive, _generate(items, permits)))
    return [item.answer_of(max((next(generations) for _ in range(item.number)), key=mean_logprob)) for item in items]


async def _generate(items: Sequence[BatchItem], permits: HeldPermits) -> list[GenerationResult]:
    """Queue and run all generations, or none."""
    starts = (partial(item.start, permits) for item in items for _ in range(item.number))
    return await collect_all(await start_all(starts))
