"""Which step a batch takes next, and which rows take part."""

from __future__ import annotations

from model_server.batch.growth import Failure, append_blocks, rows_without_slots
from model_server.engine.calls import PrefillCall, Session, StepCall
from model_server.engine.steps.context import StepContext, StepTimes
from model_server.engine.steps.decode import DecodeStep
from model_server.engine.steps.ragged import RaggedStep
from model_server.engine.steps.running import Running
from model_server.engine.steps.step import Step


def may_follow(running: Running, call: StepCall) -> bool:
    """Whether the next step can be submitted before the host has seen the last, by a feature that makes steps."""
    if running.own is None:
        return True
    decodes = running.batch.is_uniform and not isinstance(call, PrefillCall)
    return running.own.may_follow(running.rows if decodes else [])


def prepare_rows(context: StepContext, running: Running, call: StepCall) -> tuple[list[Failure], tuple[object, ...]]:
    """Give requests their blocks, and features their turn; return those that failed and left, and features' reports."""
    failures, reports = _append_blocks(context, running, call), list[object]()
    if context.features and running.batch.is_prefilling:
        failed = {sequence.id for sequence, _ in failures}
        for feature in context.features:
            with context.phase(feature.name):
                found, report = feature.prepare([s for s in running.batch.sequences if s.id not in failed])
            failures += found
            failed |= {sequence.id for sequence, _ in found}
            reports += [] if report is None else [report]
    for sequence, _ in failures:
        sequence.finished = True
    if failures:
        failed = {sequence.id for sequence, _ in failures}
        running.drop(lambda sequence: sequence.id in failed)
    return failures, tuple(reports)


def next_step(
    context: StepContext, running: Running, call: StepCall, session: Session, times: StepTimes
) -> Step | None:
    """Return the step of all rows with tokens left; None if there are none."""
    rows, batch, newest = running.rows, running.batch, running.newest
    if not rows:
        return None
    passage = None
    if context.links is not None:
        passage = context.links.start(call.sequence, len(rows) if batch.is_uniform else sum([s.samples for s in rows]))
    if not batch.is_uniform:
        running.note_other_step()
        return RaggedStep(context, rows, passage, times, batch, running.decode, newest, session, call)
    reports: tuple[object, ...] = ()
    if running.own is not None:
        step = running.own.next(rows, times, newest)
        if step is not None:
            running.decode.note_other_step()
            return step
        reports = running.own.reports
    return DecodeStep(context, rows, passage, times, running.decode, newest, reports)


def _append_blocks(context: StepContext, running: Running, call: StepCall) -> list[Failure]:
    """Give requests their blocks; return the rows that cannot take part, and why."""
    failures = []
    if call.new_blocks:
        failures = append_blocks(running.batch, running.decode.tables, call.new_blocks, context.cache)
    if context.grows and (failures or not running.repeats_rows):
        failures += rows_without_slots(running.batch)
    first: dict[int, Failure] = {}
    for failure in failures:
        first.setdefault(failure[0].id, failure)  # a request that is named twice fails once
    return list(first.values())
