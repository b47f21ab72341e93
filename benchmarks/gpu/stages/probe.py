"""S0: what this machine can do, in figures that all others are shares of, and what its libraries offer."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.measuring.roofline import Machine
from benchmarks.gpu.measuring.timing import Timing, captured, measure, synchronize
from benchmarks.gpu.running import MACHINE

CHAIN = 300
# Products [m, k] x [k, n]: the rate R, and one of a decode step's at 256 rows.
SQUARE, STEP = (8192, 8192, 8192), (256, 4096, 28672)


def run(context: Context) -> None:
    """Measure; tell the signatures by which backends are chosen."""
    bandwidth = _bandwidth(context)
    flops = _products(context)
    gap = _gap(context)
    _launches(context)
    memory = torch.cuda.get_device_properties(context.device).total_memory if context.on_cuda else 2 * 2**30
    machine = Machine(bandwidth, flops, gap, memory)
    context.note(MACHINE, json.dumps(dataclasses.asdict(machine)))
    for name, find in SIGNATURES.items():
        context.note(name, _signature(find))


def _bandwidth(context: Context) -> float:
    """Bytes/s of a copy, read and written; and of a sum, read only."""
    count = 2**20 if context.tiny else 2**30
    source = torch.randn(count, device=context.device).to(torch.bfloat16)
    target = torch.empty_like(source)
    copied = measure(lambda: target.copy_(source), context.device, repeats=20)
    rate = 2 * source.nbytes / copied.seconds
    context.figure("copy bandwidth", rate / 1e12, "TB/s", spread=copied.spread, detail="read + write")
    words = source.view(torch.float32)
    summed = measure(lambda: torch.linalg.vector_norm(words), context.device, repeats=20)
    context.figure(
        "read bandwidth", source.nbytes / summed.seconds / 1e12, "TB/s", spread=summed.spread, detail="a norm"
    )
    return rate


def _products(context: Context) -> float:
    rates = [_product(context, *(n // 64 if context.tiny else n for n in sizes)) for sizes in (SQUARE, STEP)]
    return rates[0]


def _product(context: Context, m: int, k: int, n: int) -> float:
    """Random numbers: on zeros a card draws less power and is faster than it ever is in use."""
    left, right = (torch.randn(*s, device=context.device).to(torch.bfloat16) for s in ((m, k), (k, n)))
    out = torch.empty(m, n, dtype=torch.bfloat16, device=context.device)
    timing = measure(lambda: torch.mm(left, right, out=out), context.device, repeats=20)
    rate = 2 * m * k * n / timing.seconds
    context.figure(f"matmul {m}x{k}x{n} bf16", rate / 1e12, "TFLOP/s", spread=timing.spread)
    return rate


def _gap(context: Context) -> float:
    """Seconds that one more kernel costs in a CUDA graph: chains of tiny kernels, each needing the one before."""
    cell = torch.zeros(32, device=context.device)
    timings = []
    for length in (CHAIN, 2 * CHAIN):
        replay = captured(lambda: cell.add_(1.0), context.device, calls=length)
        timings.append(measure(replay, context.device, repeats=20))
    short, long = timings
    gap = max((long.seconds - short.seconds) / CHAIN, 1e-9)
    context.figure("gap per kernel", gap, "s", spread=long.spread, detail=f"graph of {CHAIN} and {2 * CHAIN}")
    return gap


def _launches(context: Context) -> None:
    """Host time of one launch, and of one graph."""
    cell = torch.zeros(32, device=context.device)
    context.figure("host time per eager kernel", _host(lambda: cell.add_(1.0), context).seconds, "s")
    replay = captured(lambda: cell.add_(1.0), context.device, calls=CHAIN)
    context.figure(f"host time of a graph of {CHAIN}", _host(replay, context, count=20).seconds, "s")


def _host(work: Callable[[], object], context: Context, count: int = 500) -> Timing:
    synchronize(context.device)
    samples = []
    for _ in range(count):
        started = time.perf_counter()
        work()
        samples.append(time.perf_counter() - started)
    synchronize(context.device)
    return Timing(statistics.median(samples), 0.0, count)


def _varlen() -> str:
    from torch.nn.attention.varlen import varlen_attn

    return str(inspect.signature(varlen_attn))


def _continuous() -> str:
    from transformers import ContinuousBatchingConfig

    return str(inspect.signature(ContinuousBatchingConfig))


def _generate_batch() -> str:
    from transformers.generation.continuous_batching import ContinuousMixin

    return str(inspect.signature(ContinuousMixin.generate_batch))


def _grouped() -> str:
    return ", ".join(n for n in ("_grouped_mm", "_scaled_mm", "_scaled_grouped_mm") if hasattr(torch, n)) or "none"


def _kernels() -> str:
    from model_server.kernels.availability import usable

    return str(usable(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")))


def _backend() -> str:
    from model_server.attention.choice import AttentionChoice

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return AttentionChoice(None, device, torch.bfloat16).for_layers().name


def _present() -> str:
    names = ("flash_attn", "flash_attn_interface", "vllm", "triton", "flashinfer", "fastapi", "llguidance", "cupy")
    return ", ".join(n for n in names if importlib.util.find_spec(n) is not None) or "none"


SIGNATURES: dict[str, Callable[[], str]] = {
    "torch.nn.attention.varlen.varlen_attn": _varlen,
    "transformers.ContinuousBatchingConfig": _continuous,
    "generate_batch": _generate_batch,
    "torch's grouped and scaled products": _grouped,
    "Tercet's kernels usable": _kernels,
    "attention backend": _backend,
    "installed": _present,
}


def _signature(find: Callable[[], str]) -> str:
    """What `find` says, or why it cannot. Whatever a library of another version raises is an answer here."""
    try:
        return find()
    except Exception as error:
        return f"absent ({type(error).__name__}: {error})"
