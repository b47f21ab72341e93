"""S15: decode steps and prompts of the large shape as shares of the roofline, and their kernels by time: S4 in two
minutes.
"""

from __future__ import annotations

from benchmarks.gpu.context import Context
from benchmarks.gpu.measuring.idle import by_time, device_work
from benchmarks.gpu.stages.speed import decode_cell, fits, prefill_cell
from benchmarks.gpu.subjects.drive import Driver
from benchmarks.gpu.subjects.models import Subject, subjects

DECODE, PREFILL = ((1, 1024), (32, 1024), (256, 1024)), (512, 8192)
TINY_DECODE, TINY_PREFILL = ((1, 24), (3, 40)), (20,)
STEPS, TINY_STEPS = 60, 3
LISTED_STEPS = 8


def run(context: Context) -> None:
    """Of the large shape, or the user's model."""
    subject = subjects(context)[0]
    cells, prompts, steps = (TINY_DECODE, TINY_PREFILL, TINY_STEPS) if context.tiny else (DECODE, PREFILL, STEPS)
    name = subject.bar or subject.name
    tokens = max(batch * (length + 2 * steps + 64) for batch, length in cells)
    # As long as the longest prompt: a longer sequence than the graphs are made for switches them off.
    longest = max(max(length for _, length in cells) + 2 * steps, *prompts) + 64
    driver = subject.driver(context, max(tokens, longest), tuple(batch for batch, _ in cells), longest)
    for batch, length in cells:
        title = f"decode {name} b={batch} c={length}"
        if not context.has_time(6) or not fits(driver, batch, length + 2 * steps + LISTED_STEPS + 8):
            context.skip(title, "no time or memory left")
            continue
        decode_cell(context, subject, driver, title, batch, length, steps)
        _list_decode(context, driver, title, batch, length)
    for length in prompts:
        prefill_cell(context, subject, driver, f"1x{length}", [length])
        _list_prefill(context, subject, driver, length)


def _list_decode(context: Context, driver: Driver, title: str, batch: int, length: int) -> None:
    if not context.on_cuda:
        return
    rows = driver.rows_at(batch, length, LISTED_STEPS + 8)
    driver.pace(rows, 3)
    context.note(f"kernels of {title}", by_time(device_work(lambda: driver.pace(rows, LISTED_STEPS)), LISTED_STEPS + 1))


def _list_prefill(context: Context, subject: Subject, driver: Driver, length: int) -> None:
    if not context.on_cuda or not context.has_time(3):
        return
    driver.engine.clear(None)
    driver.blocks.reset()
    requests = [driver.request(driver.random_prompt(length), 1)]
    ran = device_work(lambda: driver.prefill(requests))
    context.note(f"kernels of prefill {subject.bar or subject.name} 1x{length}", by_time(ran, 1))
