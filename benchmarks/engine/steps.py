"""The steps that are measured: their inputs, and a loaded model to run them on."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers.checkpoints import SHAPES
from benchmarks.peers.quantized import arithmetic, quantize_flag
from benchmarks.peers.servers import tercet_files
from model_server.adapters.rows import adapter_rows
from model_server.attention.choice import AttentionChoice
from model_server.attention.metadata import AttentionMetadata
from model_server.config import threads_are_set
from model_server.device import finish_loading, tune
from model_server.distributed.group import connect
from model_server.distributed.layout import Ranks
from model_server.distributed.placement import Placement
from model_server.features.adapters.load import with_adapters
from model_server.memory.kv_cache import KvCache
from model_server.models.load import load_runner
from model_server.models.model import describe
from model_server.runner.runner import ModelInputs, Runner
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.sampler import Sampler
from model_server.weights.checkpoint import examine
from model_server.weights.locate import resolve

BLOCK = 16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Cell:
    """One kind of step: sequence i computes its last query[i] tokens of context[i]."""

    label: str
    query: tuple[int, ...]
    context: tuple[int, ...]


def cells(rows: Sequence[int], *, prefill: bool) -> list[Cell]:
    """A decode step for each number of rows, with 128 to 191 tokens of context, and two prefill steps."""
    made = [Cell(f"decode {n}", (1,) * n, tuple(128 + i * 37 % 64 for i in range(n))) for n in rows]
    if prefill:
        made += [Cell(f"prefill {n}x{m}", (m,) * n, (m,) * n) for n, m in ((8, 128), (2, 512))]
    return made


class Step:
    """A cell on a loaded model, with a cache and rows of a sampler of its own.

    adapters: of each row of a decode step the number of its adapter, or `adapters.rows.BASE`; none: all are the base's.
    """

    def __init__(self, cell: Cell, runner: Runner, dtype: torch.dtype, adapters: Sequence[int] = ()) -> None:
        self._runner = runner
        self._sampler = Sampler(runner.vocab_size, CPU)
        self._inputs, blocks = _inputs(cell, runner.vocab_size)
        if adapters:
            self._inputs = replace(self._inputs, adapters=adapter_rows(np.array(adapters), None, CPU))
        self._cache = KvCache(runner.kv_shapes, blocks, BLOCK, dtype, CPU)
        self._rows = [self._sampler.new_row(SamplingParameters(), [1], 10**6) for _ in cell.query]

    def forward(self) -> torch.Tensor:
        return self._runner.forward(self._inputs, self._cache)

    def choose(self, logits: torch.Tensor) -> object:
        return self._sampler.sample(logits, self._rows).to_host()


def _inputs(cell: Cell, vocab_size: int) -> tuple[ModelInputs, int]:
    """The step's inputs, and the blocks that it needs."""
    query, context = cell.query, cell.context
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
        query_lengths_host=query,
        kv_lengths_host=context,
    )
    ids = torch.randint(0, vocab_size, (sum(query),), generator=generator)
    wanted = None if max(query) == 1 else ends[1:] - 1
    return ModelInputs(ids, torch.cat(positions), metadata, wanted, ()), sum(per_row) + 1


@contextlib.contextmanager
def loaded(
    model: str,
    precision: str,
    *,
    attention: str | None = None,
    one_thread: bool = False,
    adapters: Mapping[str, Path] | None = None,
) -> Iterator[Runner]:
    """The model on this process's CPUs, in inference mode; `model`: one of SHAPES, or a folder, whose weights are
    quantized only on load. adapters: folders of LoRA adapters by their names."""
    folder = _read_from(tercet_files(model, precision) if model in SHAPES else Path(model))
    dtype = dtype_of(precision)
    tune(CPU, 1, 2**30, keep_threads=threads_are_set())
    if one_thread:
        torch.set_num_threads(1)
    joined = connect(0, 1, CPU)
    try:
        with torch.inference_mode():
            placement = Placement(CPU, dtype, Ranks.of(joined))
            described = describe(examine(folder), quantize=quantize_flag(precision))
            if adapters:
                described = with_adapters(described, adapters)
            runner = load_runner(described, placement, AttentionChoice(attention, CPU, dtype))
            finish_loading(CPU)
            yield runner
    finally:
        joined.close()


def _read_from(files: Path) -> Path:
    """The folder that the shard reads; of a GGUF file one with a config and a tokenizer made from it."""
    if files.suffix != ".gguf":
        return files
    command = [sys.executable, "-m", "model_server", "download-weights", str(files)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return resolve(str(files), None)


def dtype_of(precision: str) -> torch.dtype:
    """Of activations and the KV cache."""
    dtype: torch.dtype = getattr(torch, arithmetic(precision))
    return dtype


def clock_of(*, cpu_time: bool) -> Callable[[], float]:
    """Seconds: of this process's threads, or on the wall."""
    return time.process_time if cpu_time else time.perf_counter


def timed(run: Callable[[], object], seconds: float, clock: Callable[[], float], *, least: int = 3) -> list[float]:
    """Milliseconds of each run, at least `least`, after one to warm up."""
    run()
    times: list[float] = []
    start = clock()
    while len(times) < least or clock() - start < seconds:
        began = clock()
        run()
        times.append((clock() - began) * 1000)
    return times
