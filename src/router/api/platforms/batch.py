"""Several independent generations in one HTTP request, answered with their texts: what Vertex AI and KServe send."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import Request

from router.api.app_state import Served, request_id_of
from router.api.http.disconnect import unless_left
from router.generation.asked import GenerateRequest
from router.generation.inference import Inference, mean_logprob
from router.generation.running import Admission, Generation, Run, collect_all, start_all


@dataclass(frozen=True)
class Job:
    """A generation, so many times, and how the text of the best becomes an answer. Nothing is done before `start`."""

    start: Callable[[Admission], Awaitable[Run]]
    text_of: Callable[[Generation], str]
    number: int = 1


def job_of(inference: Inference, request: GenerateRequest, text_of: Callable[[Generation], str]) -> Job:
    """`best_of` generations of a request."""
    return Job(partial(inference.start, request), text_of, request.best_of or 1)


async def texts_of(request: Request, served: Served, jobs: Sequence[Job]) -> list[str]:
    """The answers in the order of the jobs, which run side by side; the first failure ends them all."""
    inference = served.inference
    for job in jobs:
        inference.check_best_of(job.number)
    with inference.admit(sum(job.number for job in jobs), request_id=request_id_of(request)) as admission:
        generations = iter(await unless_left(request.receive, _generate(jobs, admission)))
    return [job.text_of(max((next(generations) for _ in range(job.number)), key=mean_logprob)) for job in jobs]


async def _generate(jobs: Sequence[Job], admission: Admission) -> list[Generation]:
    """All generations of all jobs, in order; queues all or none."""
    starts = (partial(job.start, admission) for job in jobs for _ in range(job.number))
    return await collect_all(await start_all(starts))
