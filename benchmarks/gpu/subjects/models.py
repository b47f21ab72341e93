"""The models that speed is measured on: shapes with random weights, or the one that the user names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.measuring.roofline import Cost, cost_of
from benchmarks.gpu.subjects.drive import Driver, make_engine, random_cache
from benchmarks.gpu.subjects.graph_hooks import capture, graphed
from benchmarks.gpu.subjects.shapes import Shape, by_size
from benchmarks.gpu.subjects.synthetic import engine_tokenizer, make_decoder
from model_server.attention.backend import AttentionBackend
from model_server.attention.choice import select_backend
from model_server.distributed.group import ProcessGroup
from model_server.models.config import ModelConfig
from model_server.models.families import spec_of
from model_server.models.load import load_runner
from model_server.models.spec import Spec
from model_server.runner.runner import Runner
from model_server.text.tokenizer import Tokenizer

# Of the free memory that a benchmark's cache may take.
CACHE_SHARE = 0.85
MOST_CPU_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Subject:
    """name: as in TARGETS. bar: the shape's name there, also for a toy; empty for a user's model, which has no bars."""

    name: str
    bar: str
    spec: Spec
    dtype: torch.dtype
    load: Callable[[AttentionBackend], Runner]
    tokenizer: Callable[[], Tokenizer]

    @property
    def cost(self) -> Cost:
        return cost_of(self.spec, self.dtype.itemsize)

    @property
    def block_bytes(self) -> int:
        """KV bytes of one token, all layers."""
        return self.cost.kv_bytes

    def driver(self, context: Context, tokens: int, sizes: tuple[int, ...], longest: int) -> Driver:
        """An engine with a cache of `tokens` tokens, or as many as fit, and decode graphs of these batch sizes for
        sequences of up to `longest` tokens where the device has graphs."""
        backend = select_backend(None, context.device, self.dtype)
        runner = graphed(self.load(backend), context.device, sizes)
        engine = make_engine(runner, context.device, self.tokenizer(), backend)
        num_blocks = min(-(-tokens // backend.block_size) + 1, self._most_blocks(context, backend.block_size))
        random_cache(engine, num_blocks, self.dtype)
        recorded = capture(engine, longest)
        context.note(f"{self.name}: CUDA graphs", f"{len(recorded)} sizes recorded: {recorded}")
        return Driver(engine)

    def _most_blocks(self, context: Context, block_size: int) -> int:
        free = torch.cuda.mem_get_info(context.device)[0] * CACHE_SHARE if context.on_cuda else MOST_CPU_BYTES
        return int(free / (self.block_bytes * block_size))


def of_shape(context: Context, shape: Shape, bar: str) -> Subject:
    dtype = torch.bfloat16 if context.on_cuda else torch.float32
    load = partial(_load_shape, shape, context.device, dtype)
    return Subject(shape.name, bar, shape.spec, dtype, load, partial(engine_tokenizer, shape.vocab))


def of_folder(context: Context, folder: Path) -> Subject:
    """Raises StartupError or ValueError for a model that the native decoder does not serve or that has no roofline."""
    dtype = torch.bfloat16 if context.on_cuda else torch.float32
    spec = spec_of(ModelConfig.read(folder))
    cost_of(spec)
    load = partial(_load_folder, folder, context.device, dtype)
    return Subject(folder.name, "", spec, dtype, load, partial(Tokenizer.load, folder))


def subjects(context: Context, *, experts: bool = False) -> list[Subject]:
    """The large dense shape first; the one with experts last, if asked for."""
    if context.model is not None:
        return [of_folder(context, context.model)]
    small, large, moe = by_size(context.tiny)
    found = [of_shape(context, large, "8B"), of_shape(context, small, "1B")]
    return [*found, of_shape(context, moe, "MoE")] if experts else found


def _load_shape(shape: Shape, device: torch.device, dtype: torch.dtype, backend: AttentionBackend) -> Runner:
    return make_decoder(shape, device, dtype, attention=backend)


def _load_folder(folder: Path, device: torch.device, dtype: torch.dtype, backend: AttentionBackend) -> Runner:
    return load_runner(folder, device=device, dtype=dtype, group=ProcessGroup(), attention=backend)
