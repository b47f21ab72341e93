"""Which step a batch takes next, and which rows take part."""

from __future__ import annotations

from model_server.batch.growth import Failure, append_blocks, rows_without_slots
from model_server.batch.results import NOTHING_DRAFTED, Drafted
from model_server.engine.calls import PrefillCall, Session, StepCall
from model_server.engine.steps.context import StepContext, StepTimes
from model_server.engine.steps.decode import DecodeStep
from model_server.engine.steps.ragged import RaggedStep
from model_server.engine.steps.running import Running
from model_server.engine.steps.step import Step
from model_server.engine.steps.verify import DeviceVerifyStep, VerifyStep
from model_server.speculation.device.speculator import DeviceSpeculator


def may_follow(context: StepContext, running: Running, call: StepCall) -> bool:
    """Whether, by its drafts, the next step can be submitted before the host has seen the last."""
    speculator = context.speculator
    if not isinstance(speculator, DeviceSpeculator):
        return True
    rows = running.rows
    if rows and running.batch.is_uniform and not isinstance(call, PrefillCall):
        if speculator.on_host(rows):
            return False
        if running.windows is not None and running.has_open_window:
            return speculator.on_device(running.windows, rows) and running.windows.state.can_go_on(rows)
    return not running.has_open_window


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
    speculator = context.speculator
    if isinstance(speculator, DeviceSpeculator) and speculator.on_device(running.windows, rows):
        running.decode.note_other_step()
        windows = running.device_windows(speculator, context.staging)
        return DeviceVerifyStep(context, rows, passage, times, speculator, windows, running.decode, newest)
    drafted: Drafted | None = None
    if speculator is not None and not any(s.has_unseen for s in rows):
        compute = None
        if isinstance(speculator, DeviceSpeculator):
            compute = running.device_windows(speculator, context.staging).state.guess
        with context.phase("drafting"), times.drafting():
            window = speculator.window(rows, compute)
        if window is not None:
            running.note_other_step()
            return VerifyStep(context, passage, times, speculator, window, running.decode)
        drafted = NOTHING_DRAFTED
    running.leave_windows()
    if running.windows is not None:
        running.windows.rested()
    return DecodeStep(context, rows, passage, times, running.decode, newest, drafted)


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
