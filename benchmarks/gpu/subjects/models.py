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
from model_server.attention.choice import AttentionChoice
from model_server.distributed.placement import Placement
from model_server.models.decoder.spec import Spec
from model_server.models.load import load_runner
from model_server.models.model import describe
from model_server.runner.runner import Runner
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import examine

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
    load: Callable[[], Runner]
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
        runner = graphed(self.load(), context.device, sizes)
        engine = make_engine(runner, context.device, self.tokenizer())
        block_size = runner.traits.block_size
        num_blocks = min(-(-tokens // block_size) + 1, self._most_blocks(context, block_size))
        random_cache(engine, num_blocks, self.dtype)
        recorded = capture(engine, longest)
        context.note(f"{self.name}: CUDA graphs", f"{len(recorded)} sizes recorded: {recorded}")
        return Driver(engine)

    def _most_blocks(self, context: Context, block_size: int) -> int:
        free = torch.cuda.mem_get_info(context.device)[0] * CACHE_SHARE if context.on_cuda else MOST_CPU_BYTES
        return int(free / (self.block_bytes * block_size))


def of_shape(context: Context, shape: Shape, bar: str) -> Subject:
    dtype = torch.bfloat16 if context.on_cuda else torch.float32
    load = partial(make_decoder, shape, context.device, dtype)
    return Subject(shape.name, bar, shape.spec, dtype, load, partial(engine_tokenizer, shape.vocab))


def of_folder(context: Context, folder: Path) -> Subject:
    """Raises StartupError or ValueError for a model that the native decoder does not serve or that has no roofline."""
    dtype = torch.bfloat16 if context.on_cuda else torch.float32
    model = describe(examine(folder))
    if model.spec is None:
        raise ValueError(f"{folder} is not of a family that the native decoder serves")
    cost_of(model.spec)
    load = partial(load_runner, model, Placement(context.device, dtype), AttentionChoice(None, context.device, dtype))
    return Subject(folder.name, "", model.spec, dtype, load, partial(Tokenizer.load, folder))


def subjects(context: Context, *, experts: bool = False) -> list[Subject]:
    """The large dense shape first; the one with experts last, if asked for."""
    if context.model is not None:
        return [of_folder(context, context.model)]
    small, large, moe = by_size(context.tiny)
    found = [of_shape(context, large, "8B"), of_shape(context, small, "1B")]
    return [*found, of_shape(context, moe, "MoE")] if experts else found
