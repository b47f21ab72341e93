"""The host's share of a step: waiting for tokens, and their text."""

from __future__ import annotations

import time
from dataclasses import dataclass

from model_server.batch.results import Generation
from model_server.distributed.stage_links import StageTokens
from model_server.engine.answers import Answers
from model_server.engine.profile import NoProfiler, StepProfiler
from model_server.engine.running import Running, SubmittedStep


@dataclass(frozen=True, slots=True)
class SeenStep:
    """What a step brought; times by `time.perf_counter_ns`."""

    generations: list[Generation]
    waited_from: int
    on_host: int
    done: int


def see(running: Running, step: SubmittedStep, answers: Answers, profiler: StepProfiler | NoProfiler) -> SeenStep:
    """Give the step's tokens to the sequences; later calls repeat the first result or error."""
    if not step.seen.done():
        try:
            step.seen.set_result(_see(running, step, answers, profiler))
        except BaseException as error:
            step.seen.set_exception(error)
    seen: SeenStep = step.seen.result()
    return seen


def _see(running: Running, step: SubmittedStep, answers: Answers, profiler: StepProfiler | NoProfiler) -> SeenStep:
    waited_from = time.perf_counter_ns()
    with profiler.phase("wait"):
        host = step.sampled.to_host() if step.sampled is not None else None
    on_host = time.perf_counter_ns()
    if step.passage is not None:
        step.passage.reply(StageTokens([], []) if host is None else StageTokens(host.ids, host.failed))
    if running.in_flight is step:
        running.in_flight = None
    with profiler.phase("text"):
        generations = answers.step(step.rows, host) if host is not None else []
    if host is not None and host.counts is not None:
        running.batch.note_several(step.rows, host.counts)
    if step.window is not None and running.windows is not None:
        step.drafted = running.windows.seen(step.rows, step.window, step.length)
    return SeenStep(generations, waited_from, on_host, time.perf_counter_ns())
