"""S4: decode steps, prefills and attention as shares of what the card allows; quantized products beside plain ones."""

from __future__ import annotations

import gc

import torch

from benchmarks.gpu.cases.attention_alone import Scene, make_layer, make_scene
from benchmarks.gpu.cases.quantized import run_speed
from benchmarks.gpu.context import Context
from benchmarks.gpu.measuring import predictions, roofline
from benchmarks.gpu.measuring.idle import busy_share, device_spans
from benchmarks.gpu.measuring.timing import Timing, captured, measure, of_samples
from benchmarks.gpu.subjects.drive import Driver
from benchmarks.gpu.subjects.models import Subject, subjects
from model_server.attention.choice import AttentionChoice

# (batch, context), what has a bar first.
DECODE = [(b, 1024) for b in (1, 8, 32, 64, 128, 256)] + [(b, 4096) for b in (1, 32, 64, 128, 8, 256)]
TINY_DECODE = [(1, 24), (3, 40), (2, 500)]
PREFILL = {
    "1x2048": [2048],
    "8x1024 ragged": [512, 1536, 768, 1280, 1000, 1048, 640, 1408],
    "1x1024": [1024],
    "1x8192": [8192],
}
TINY_PREFILL = {"1x20": [20], "3x10 ragged": [5, 14, 11]}
OFFLINE = [(1000, 1000), (128, 2048)]
OFFLINE_ROWS = 256
# Steps of each of the two runs.
STEPS, TINY_STEPS = 60, 3
IDLE_STEPS = 24


def run(context: Context) -> None:
    """The large shape first; each model is gone before the next one is loaded."""
    if context.model is None:
        _attention(context)
        run_speed(context)
    for subject in subjects(context, experts=True):
        if not context.has_time(15):
            context.skip(f"speed of {subject.name}", "no time left")
            continue
        _measure(context, subject)
        gc.collect()
        if context.on_cuda:
            torch.cuda.empty_cache()


def _measure(context: Context, subject: Subject) -> None:
    cells = TINY_DECODE if context.tiny else DECODE
    prefills = TINY_PREFILL if context.tiny else PREFILL
    steps = TINY_STEPS if context.tiny else STEPS
    wanted = max(batch * (length + steps * 2 + 32) for batch, length in cells)
    sizes = {batch for batch, _ in cells}
    if not context.tiny:
        sizes |= {32, OFFLINE_ROWS}
    # A longer sequence than the graphs are made for, be it a prompt, switches them off for all that follows.
    longest = max(max(length for _, length in cells) + 2 * steps, *map(max, prefills.values())) + 64
    driver = subject.driver(context, wanted, tuple(sizes), longest)
    for batch, length in cells:
        name = f"decode {subject.bar or subject.name} b={batch} c={length}"
        if not context.has_time(8):
            context.skip(name, "no time left")
        elif not fits(driver, batch, length + 2 * steps + 4):
            context.skip(name, "its KV cache does not fit beside the weights")
        else:
            decode_cell(context, subject, driver, name, batch, length, steps)
        if (batch, length) == cells[1]:  # between the cells with a bar and the rest
            for prefill, lengths in prefills.items():
                prefill_cell(context, subject, driver, prefill, lengths)
            if context.on_cuda:
                _idle(context, subject, driver)
    if not context.tiny:
        _offline(context, subject, driver)


def fits(driver: Driver, batch: int, length: int) -> bool:
    size = driver.engine.options.block_size
    return batch * -(-length // size) < driver.engine.cache.num_blocks


def decode_cell(
    context: Context, subject: Subject, driver: Driver, name: str, batch: int, length: int, steps: int
) -> None:
    """Time from the end of one step on the device to the end of the next, draws included."""
    timing = _step(driver, batch, length, steps)
    machine, cost = context.ceilings, subject.cost
    context.figure(
        name,
        timing.seconds,
        "s",
        ratio=roofline.step_seconds(cost, machine, batch, length) / timing.seconds,
        spread=timing.spread,
        predicted=predictions.decode_seconds(cost, machine, batch, length),
        detail=f"{batch / timing.seconds:,.0f} tok/s",
    )


def _step(driver: Driver, batch: int, length: int, steps: int) -> Timing:
    batch_id = driver.rows_at(batch, length, 2 * steps + 4)
    return of_samples(driver.pace(batch_id, steps).intervals, driver.pace(batch_id, steps).intervals)


def prefill_cell(context: Context, subject: Subject, driver: Driver, name: str, lengths: list[int]) -> None:
    title = f"prefill {subject.bar or subject.name} {name}"
    if not context.has_time(5) or not fits(driver, 1, sum(lengths) + len(lengths) * driver.engine.options.block_size):
        context.skip(title, "no time or memory left")
        return
    timing = _prefill_timing(context, driver, lengths)
    machine = context.ceilings
    context.figure(
        title,
        timing.seconds,
        "s",
        ratio=roofline.prefill_seconds(subject.cost, machine, lengths) / timing.seconds,
        spread=timing.spread,
        predicted=predictions.prefill_seconds(subject.cost, machine, lengths),
        detail=f"{sum(lengths) / timing.seconds:,.0f} tok/s",
    )


def _prefill_timing(context: Context, driver: Driver, lengths: list[int]) -> Timing:
    prompts = [driver.random_prompt(n) for n in lengths]

    def once() -> None:
        driver.engine.clear(0)
        driver.blocks.reset()
        driver.prefill([driver.request(p, 1) for p in prompts])

    return measure(once, context.device, repeats=2 if context.tiny else 12, warm_up=1)


def _idle(context: Context, subject: Subject, driver: Driver) -> None:
    """The share of time without a kernel while 32 rows decode."""
    name = f"idle {subject.bar or subject.name} b=32"
    steps = IDLE_STEPS
    if not context.has_time(10) or not fits(driver, 32, 1024 + 4 * steps):
        context.skip(name, "no time or memory left")
        return
    batch_id = driver.rows_at(32, 1024, 3 * steps)
    driver.pace(batch_id, 4)
    spans = device_spans(lambda: driver.pace(batch_id, steps))
    context.figure(name, 1 - busy_share(spans), "share", detail=f"{len(spans) // steps} kernels a step")


def _offline(context: Context, subject: Subject, driver: Driver) -> None:
    """Throughput of endless requests, put together from a measured step at the middle of the output and a prefill."""
    for prompt, output in OFFLINE:
        name = f"offline {subject.bar or subject.name} {prompt}/{output}"
        middle = prompt + output // 2
        rows = OFFLINE_ROWS
        while rows > 1 and not fits(driver, rows, middle + 2 * STEPS + 4):
            rows //= 2
        if not context.has_time(12):
            context.skip(name, "no time left")
            continue
        step = _step(driver, rows, middle, STEPS)
        prefill = _prefill_timing(context, driver, [prompt] * 8)
        rate = output / (prefill.seconds / 8 + output * step.seconds / rows)
        machine, cost = context.ceilings, subject.cost
        capacity = roofline.kv_tokens(cost, machine, 0.95)
        limit = roofline.offline_tokens_per_second(cost, machine, prompt, output, capacity)
        context.figure(name, rate, "tok/s", ratio=rate / limit, spread=step.spread, detail=f"from steps of {rows} rows")


def _attention(context: Context) -> None:
    """The kernel alone, as part of a CUDA graph: heads and head size of the 8B shape."""
    heads, kv_heads, dim = (4, 1, 16) if context.tiny else (32, 8, 128)
    batch, length = (3, 40) if context.tiny else (64, 4096)
    prompt = 48 if context.tiny else 8192
    dtype = torch.bfloat16 if context.on_cuda else torch.float32
    block_size = AttentionChoice(None, context.device, dtype).for_layers().block_size
    layer = make_layer(heads, kv_heads, dim)
    decode = make_scene(layer, [(length - 1, length)] * batch, block_size, dtype, context.device, poison=False)
    least = batch * length * 2 * kv_heads * dim * dtype.itemsize / context.ceilings.bandwidth
    _alone(context, f"decode attention b={batch} c={length}", decode, least, least / predictions.ATTENTION)
    whole = make_scene(layer, [(0, prompt)], block_size, dtype, context.device, poison=False)
    least = roofline.prefill_attention_flops(heads, dim, prompt) / context.ceilings.flops
    _alone(context, f"prefill attention n={prompt}", whole, least, least / predictions.PREFILL_ATTENTION)


def _alone(context: Context, name: str, scene: Scene, least: float, predicted: float) -> None:
    backend = AttentionChoice(None, context.device, scene.query.dtype).for_layers()
    with torch.inference_mode():
        step = backend.start(scene.metadata, scene.cache)

        def attend() -> None:
            step.attend(scene.layer, scene.query, scene.key, scene.value)

        calls = 1 if context.tiny else 8
        work = captured(attend, context.device, calls) if backend.name != "reference" else attend
        calls = calls if backend.name != "reference" else 1
        timing = measure(work, context.device, repeats=4 if context.tiny else 50)
    seconds = timing.seconds / calls
    context.figure(
        name, seconds, "s", ratio=least / seconds, spread=timing.spread, predicted=predicted, detail=backend.name
    )
