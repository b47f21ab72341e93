"""S7: what the warm-up calls capacity, against what really fits: every block filled beside the largest prefill."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.subjects.drive import Driver, make_engine
from benchmarks.gpu.subjects.graph_hooks import graphed
from benchmarks.gpu.subjects.models import Subject, subjects
from model_server.batch.sequence import NewRequest
from model_server.distributed.group import ProcessGroup
from model_server.engine.calls import PrefillCall, Session
from model_server.engine.engine import Engine
from model_server.engine.memory_plan import MemoryPlan
from model_server.engine.warm_up import WarmupRequest, warm_up
from model_server.errors import OutOfMemoryError
from model_server.memory.budget import CudaMemory
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.runner.graph_sizes import DEFAULT_SIZES
from model_server.sampling.parameters import SamplingParameters, StoppingParameters

FRACTIONS = (0.95, 0.9, 0.5)
PREFILL_TOKENS = 8192
ROW_TOKENS = 32_768
# What another process holds while the warm-up runs.
NEIGHBOUR_BYTES = 8 * 2**30
# Above the fraction: the allocator's rounding and what libraries keep for themselves.
SLACK = 0.01


@dataclass(frozen=True, slots=True)
class Warmed:
    """A warm-up's result. budget: bytes that the fraction leaves for cache and activations after loading."""

    tokens: int
    seconds: float
    budget: float


def run(context: Context) -> None:
    """One engine after another on the same weights; the last one beside another process."""
    subject = subjects(context)[0]
    runner = graphed(subject.load(), context.device, DEFAULT_SIZES)
    tokenizer = subject.tokenizer()
    for fraction in FRACTIONS:
        if not context.has_time(12):
            context.skip(f"fraction {fraction}", "no time left")
            continue
        engine = make_engine(runner, context.device, tokenizer)
        warmed = _warm(context, subject, engine, fraction)
        peak = _fill(context, engine, fraction)
        if context.on_cuda and peak is not None:
            _tell(context, subject, warmed, fraction, peak)
        engine.set_cache(None)
        if isinstance(runner, GraphedRunner):
            runner.release()  # the graphs hold the cache that they were recorded over
        del engine
        _collect(context)
    if context.on_cuda and context.has_time(20):
        engine = make_engine(runner, context.device, tokenizer)
        with _neighbour():
            _warm(context, subject, engine, 0.9)
            free, total = torch.cuda.mem_get_info(context.device)
        used = 1 - free / total
        context.check("beside another process the fraction 0.9 holds", used <= 0.9 + SLACK, f"{used:.1%} of the card")


def _prefill_tokens(context: Context) -> int:
    return 64 if context.tiny else PREFILL_TOKENS


def _warm(context: Context, subject: Subject, engine: Engine, fraction: float) -> Warmed:
    """The router's warm-up: one prompt of the largest prefill."""
    length = _prefill_tokens(context)
    budget = 0.0
    if context.on_cuda:
        _collect(context)
        free, total = torch.cuda.mem_get_info(context.device)
        budget = fraction * total - (total - free)
    plan = MemoryPlan(
        dtype=subject.dtype,
        max_batch_total_tokens=None,
        cuda_memory_fraction=fraction,
        model_max_length=None,
        memory=CudaMemory(context.device) if context.on_cuda else None,
    )
    request = NewRequest(
        id=0, sampling=SamplingParameters(),
        stopping=StoppingParameters(max_new_tokens=2, ignore_eos_token=True), prefill_logprobs=False, top_n_tokens=0,
        blocks=np.zeros(0, np.int32), cache_len=0, chunk_len=None,
        input_ids=tuple(2 + i % 200 for i in range(length)),
    )  # fmt: skip
    session = Session(max_prefill_tokens=length)
    asked = WarmupRequest(session=session, requests=[request], max_input_tokens=None, max_total_tokens=None)
    started = time.perf_counter()
    capacity = warm_up(engine, ProcessGroup(), plan, asked)
    return Warmed(capacity.total_tokens, time.perf_counter() - started, budget)


def _fill(context: Context, engine: Engine, fraction: float) -> float | None:
    """Rows that own every block but those of the largest prefill, which then joins them, and a step of all.

    Returns the bytes that the prefill took beside the cache; None if it did not fit.
    """
    driver = Driver(engine)
    size, largest = engine.options.block_size, _prefill_tokens(context)
    left = (engine.cache.num_blocks - 1) * size - (largest + size)
    row = min(ROW_TOKENS, engine.runner.max_positions or ROW_TOKENS) - 2 * size
    requests = []
    while left >= 2 * size:
        length = min(row, left - size)
        taken = -(-(length + 4) // size) * size
        if taken > left:
            break
        requests.append(driver.request([2] * length, 4, cached=length - 1))
        left -= taken
    name = f"fraction {fraction}: every block and the largest prefill fit"
    try:
        driver.prefill(requests)
        if context.on_cuda:
            torch.cuda.reset_peak_memory_stats(context.device)
        held = torch.cuda.memory_allocated(context.device) if context.on_cuda else 0
        newcomer = driver.request(driver.random_prompt(largest), 2)
        joining = PrefillCall(batch_id=1, cached_id=0, sequence=driver.next_call())
        engine.submit_prefill(joining, [newcomer])()
        driver.decode()
    except OutOfMemoryError as error:
        context.check(name, False, str(error))
        return None
    context.check(name, True, f"{len(requests)} rows beside it")
    return float(torch.cuda.max_memory_allocated(context.device) - held) if context.on_cuda else 0.0


def _tell(context: Context, subject: Subject, warmed: Warmed, fraction: float, peak: float) -> None:
    """KV tokens against those of the budget less what the largest prefill was just seen to take; the graphs count as
    loss."""
    per_token = subject.cost.kv_bytes
    possible = (warmed.budget - peak) / per_token
    context.figure(
        f"fraction {fraction}: KV allocated/possible",
        warmed.tokens / possible,
        "share",
        predicted=0.95,
        target="KV allocated/possible",
        detail=f"{warmed.tokens:,} tokens; {warmed.tokens * per_token / warmed.budget:.1%} of the budget",
    )
    context.figure(f"fraction {fraction}: warm-up with all graphs", warmed.seconds, "s", target="start")


@contextmanager
def _neighbour() -> Iterator[None]:
    """Another process that holds memory of the card."""
    code = (
        f"import torch, sys; held = torch.ones({NEIGHBOUR_BYTES}, dtype=torch.uint8, device='cuda'); "
        "torch.cuda.synchronize(); print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        if other.stdout.readline().strip() != b"held":
            raise RuntimeError("the other process could not take its memory")
        yield
    finally:
        other.kill()
        other.wait()


def _collect(context: Context) -> None:
    gc.collect()
    if context.on_cuda:
        torch.cuda.empty_cache()
