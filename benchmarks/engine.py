"""What a step of the engine costs in this process, no server: `python -m benchmarks.engine [--shape 135M]`.

The checkpoints are those of `benchmarks.peers`. A decode step at a batch of 1, 8 and 32 rows with 128 to 192 tokens of
context, a prefill of 8 prompts of 128 and of 2 of 512 tokens, each with its greedy choice: the median and the quickest
of several runs, in milliseconds, and what the loop would give in tokens per second if nothing else took time.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.peers.checkpoints import SHAPES, checkpoint
from model_server.attention.choice import AttentionChoice
from model_server.attention.metadata import AttentionMetadata
from model_server.config import threads_are_set
from model_server.device import settle, tune
from model_server.distributed.group import ProcessGroup, connect
from model_server.distributed.layout import Ranks
from model_server.distributed.placement import Placement
from model_server.memory.kv_cache import KvCache
from model_server.models.load import load_runner
from model_server.models.model import describe
from model_server.runner.runner import ModelInputs, Runner
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.sampler import Sampler
from model_server.weights.checkpoint import examine

BLOCK = 16


def inputs(query: list[int], context: list[int], vocab_size: int) -> tuple[ModelInputs, int]:
    """A step in which sequence i computes its last query[i] tokens of context[i]; and the blocks that it needs."""
    per_row = [(n + BLOCK - 1) // BLOCK for n in context]
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(sum(per_row), generator=generator) + 1
    tables = torch.zeros(len(query), max(per_row), dtype=torch.int32)
    slots, positions, first = [], [], 0
    for i, (q, n) in enumerate(zip(query, context, strict=True)):
        blocks = order[first : first + per_row[i]]
        tables[i, : per_row[i]] = blocks
        at = torch.arange(n - q, n)
        slots.append(blocks[at // BLOCK] * BLOCK + at % BLOCK)
        positions.append(at)
        first += per_row[i]
    ends = torch.tensor([0, *query]).cumsum(0)
    metadata = AttentionMetadata(
        slots=torch.cat(slots),
        block_tables=tables,
        cu_seqlens_q=ends.int(),
        kv_lengths=torch.tensor(context, dtype=torch.int32),
        query_lengths_host=tuple(query),
        kv_lengths_host=tuple(context),
    )
    ids = torch.randint(0, vocab_size, (sum(query),), generator=generator)
    wanted = None if max(query) == 1 else ends[1:] - 1
    return ModelInputs(ids, torch.cat(positions), metadata, wanted, ()), sum(per_row) + 1


def timed(run: Callable[[], object], seconds: float, clock: Callable[[], float]) -> list[float]:
    """Milliseconds of each run, after one to warm up; at least three."""
    run()
    times: list[float] = []
    start = clock()
    while len(times) < 3 or clock() - start < seconds:
        began = clock()
        run()
        times.append((clock() - began) * 1000)
    return times


@contextlib.contextmanager
def group() -> Iterator[ProcessGroup]:
    joined = connect(0, 1, torch.device("cpu"))
    try:
        yield joined
    finally:
        joined.close()


def measure(runner: Runner, dtype: torch.dtype, args: argparse.Namespace) -> None:
    sampler = Sampler(runner.vocab_size, torch.device("cpu"))
    clock = time.process_time if args.cpu_time else time.perf_counter
    cells = [(f"decode {n}", [1] * n, [128 + (i * 37) % 64 for i in range(n)]) for n in args.rows]
    if not args.no_prefill:
        cells += [("prefill 8x128", [128] * 8, [128] * 8), ("prefill 2x512", [512] * 2, [512] * 2)]
    labels = [label for label, _, _ in cells]
    if args.profile and args.profile not in labels:
        raise SystemExit(f"--profile {args.profile!r}: the cells are {', '.join(labels)}")
    for label, query, context in cells:
        model, blocks = inputs(query, context, runner.vocab_size)
        cache = KvCache(runner.kv_shapes, blocks, BLOCK, dtype, torch.device("cpu"))
        rows = [sampler.new_row(SamplingParameters(), [1], 10**6) for _ in query]

        def forward(model: ModelInputs = model, cache: KvCache = cache) -> torch.Tensor:
            return runner.forward(model, cache)

        logits = forward()
        step = timed(forward, args.seconds, clock)
        choice = timed(lambda logits=logits, rows=rows: sampler.sample(logits, rows).to_host(), args.seconds / 4, clock)
        middle = statistics.median(step) + statistics.median(choice)
        print(
            f"{label:14} forward {statistics.median(step):8.2f} (min {min(step):8.2f}) ms   "
            f"choice {statistics.median(choice):6.2f} ms   {sum(query) * 1000 / middle:9.1f} tok/s",
            flush=True,
        )
        if args.profile == label:
            with torch.profiler.profile() as profile:
                for _ in range(5):
                    forward()
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="135M")
    parser.add_argument("--model", type=Path, help="another checkpoint instead of a shape")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread, CPU time: on a machine that does other work as well"
    )
    parser.add_argument("--attention", default=None)
    parser.add_argument("--profile", help="a cell, such as `decode 8`: print the operators of five of its steps")
    args = parser.parse_args()
    device, dtype = torch.device("cpu"), getattr(torch, args.dtype)
    folder = args.model or checkpoint(args.shape)
    threads = tune(device, 1, 2**30, keep_threads=threads_are_set())
    if args.cpu_time:
        torch.set_num_threads(threads := 1)
    with group() as alone, torch.inference_mode():
        placement = Placement(device, dtype, Ranks.of(alone))
        choice = AttentionChoice(args.attention, device, dtype)
        runner = load_runner(describe(examine(folder)), placement, choice)
        settle(device)
        print(f"{folder.name}, {args.dtype}, {threads} threads")
        measure(runner, dtype, args)


if __name__ == "__main__":
    main()
