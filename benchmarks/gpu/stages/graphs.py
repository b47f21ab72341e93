"""S2: captured decode steps: the bits of eager ones, padding that touches nobody, and no growth however often."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases.attention_alone import make_metadata
from benchmarks.gpu.context import Context
from benchmarks.gpu.subjects import graph_hooks
from benchmarks.gpu.subjects.shapes import Shape, by_size
from benchmarks.gpu.subjects.synthetic import make_decoder
from model_server.attention.choice import AttentionChoice
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.runner.graph_capture import CudaGraphCapture
from model_server.runner.graph_sizes import DEFAULT_SIZES
from model_server.runner.runner import ModelInputs

MAX_LENGTH = 4096
REPLAYS = 1000
# Another number of rows: other tiles in the products, other splits in the attention. Random weights make much of it:
# 2.0e-2 on an H200.
PADDED_ERROR = 4e-2


def run(context: Context) -> None:
    """The small dense shape with all sizes that the server captures."""
    shape = by_size(context.tiny)[0]
    dtype = torch.bfloat16 if context.on_cuda else torch.float32
    backend = AttentionChoice(None, context.device, dtype).for_layers()
    if not backend.capturable:
        context.skip("CUDA graphs", f"the attention backend {backend.name} needs the host")
        return
    eager = make_decoder(shape, context.device, dtype, attention=backend)
    sizes = tuple(sorted((1, 2, 4) if context.tiny else DEFAULT_SIZES, reverse=True))
    capture: Any = CudaGraphCapture(context.device) if context.on_cuda else graph_hooks.RepeatingGraphCapture()
    runner = GraphedRunner(eager, sizes, capture)
    scene = Scene(context, shape, dtype, backend.block_size, rows=sizes[0] + 8)
    cache = _capture(context, runner, capture, scene, sizes)
    _equal(context, runner, eager, scene, cache)
    _padding(context, runner, scene, cache)
    _moved(context, runner, scene, cache)
    _growth(context, runner, capture, scene, cache)


class Scene:
    """Sequences of random lengths over a random cache; tables can be moved without a change of meaning."""

    def __init__(self, context: Context, shape: Shape, dtype: torch.dtype, block_size: int, rows: int) -> None:
        self.device = context.device
        self.max_length = 64 if context.tiny else MAX_LENGTH
        self.size = block_size
        self.vocab = shape.vocab
        generator = torch.Generator().manual_seed(context.seed)
        self.lengths = torch.randint(2, self.max_length // 2, (rows,), generator=generator).tolist()
        counts = [-(-n // block_size) for n in self.lengths]
        order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        self.tables = []
        for count in counts:
            self.tables.append(order[:count])
            order = order[count:]
        self.ids = torch.randint(2, shape.vocab, (rows,), generator=generator)
        layers, width = shape.layers, shape.kv_heads * shape.head_dim * 2
        self.rows = [
            torch.randn((sum(counts) + 1) * block_size, width, device=self.device).to(dtype) for _ in range(layers)
        ]

    def make_cache(self, runner: Any, dtype: torch.dtype) -> KvCache:
        cache = KvCache(runner.kv_shapes, len(self.rows[0]) // self.size, self.size, dtype, self.device)
        self.reset(cache)
        return cache

    def reset(self, cache: KvCache) -> None:
        for rows, saved in zip(cache.rows, self.rows, strict=True):
            rows.copy_(saved)

    def inputs(self, members: list[int], tables: list[list[int]] | None = None) -> ModelInputs:
        """A decode step of these sequences."""
        tables = tables or self.tables
        lengths = [self.lengths[i] for i in members]
        return ModelInputs(
            input_ids=self.ids[members].to(self.device),
            positions=torch.tensor([n - 1 for n in lengths], device=self.device),
            attention=make_metadata(
                [tables[i] for i in members], [(n - 1, n) for n in lengths], self.size, self.device
            ),
            logit_rows=None,
        )


def _capture(context: Context, runner: Any, capture: Any, scene: Scene, sizes: tuple[int, ...]) -> KvCache:
    """All sizes, twice: the first time kernels are compiled. The cache that the graphs read."""
    dtype = scene.rows[0].dtype
    cache = scene.make_cache(runner, dtype)
    runner.capture(cache, scene.max_length, ProcessGroup())
    runner.release()
    before, started = capture.used_bytes(), time.perf_counter()
    runner.capture(cache, scene.max_length, ProcessGroup())
    seconds = time.perf_counter() - started
    taken = capture.used_bytes() - before
    context.check("all sizes captured", runner.captured_sizes == tuple(reversed(sizes)), f"{len(sizes)} sizes")
    context.figure("capture of all sizes", seconds, "s", target="capture", predicted=0.15 * len(sizes))
    context.figure("memory of all graphs", taken / 2**20, "MiB", detail=f"{taken / len(sizes) / 2**20:.2f} MiB each")
    scene.reset(cache)
    return cache


def _equal(context: Context, runner: Any, eager: Any, scene: Scene, cache: KvCache) -> None:
    """Replay against the same kernels launched one by one: with as many rows the same bits."""
    sizes = runner.captured_sizes
    different, far, worst = [], [], 0.0
    for count in sorted({*sizes, *(s - 1 for s in sizes if s > 2)}):
        members = list(range(count))
        scene.reset(cache)
        replayed = runner.forward(scene.inputs(members), cache).clone()
        scene.reset(cache)
        wanted = eager.forward(scene.inputs(members), cache)
        if count in sizes and not torch.equal(replayed, wanted):
            different.append(count)
        error = _error(replayed, wanted)
        worst = max(worst, error)
        if not error < PADDED_ERROR:
            far.append(count)
    context.check("replay has the bits of eager steps", not different, f"sizes that differ: {different}")
    context.check("padded steps are eager ones", not far, f"worst error {worst:.1e}; sizes beyond: {far}")


def _padding(context: Context, runner: Any, scene: Scene, cache: KvCache) -> None:
    """What padding rows held before changes no live row, and only live slots and block 0 are written."""
    size = next(s for s in runner.captured_sizes if s > 2)
    live = list(range(size - 1))
    scene.reset(cache)
    first = runner.forward(scene.inputs(live), cache).clone()
    scene.reset(cache)
    runner.forward(scene.inputs(list(range(size, 2 * size))), cache)  # a full step of others
    scene.reset(cache)
    inputs = scene.inputs(live)
    second = runner.forward(inputs, cache).clone()
    context.check("padding rows do not change live rows", torch.equal(first, second))
    touched = torch.zeros(len(scene.rows[0]), dtype=torch.bool, device=scene.device)
    touched[inputs.attention.slots] = True
    touched[: scene.size] = True
    same = all(torch.equal(a[~touched], b[~touched]) for a, b in zip(cache.rows, scene.rows, strict=True))
    context.check("only the step's slots and the reserved block are written", same)


def _moved(context: Context, runner: Any, scene: Scene, cache: KvCache) -> None:
    """Tables, slots and lengths that change after the capture count."""
    members = list(range(runner.captured_sizes[1]))
    scene.reset(cache)
    before = runner.forward(scene.inputs(members), cache).clone()
    scene.reset(cache)
    blocks = len(scene.rows[0]) // scene.size
    places = torch.cat((torch.zeros(1, dtype=torch.int64), torch.randperm(blocks - 1) + 1))
    for rows, saved in zip(cache.rows, scene.rows, strict=True):
        view = rows.view(blocks, scene.size, -1)
        view[places.to(scene.device)] = saved.view(blocks, scene.size, -1)
    tables = [[int(places[b]) for b in table] for table in scene.tables]
    after = runner.forward(scene.inputs(members, tables), cache).clone()
    context.check("changed block tables and slots are honoured", torch.equal(before, after))
    scene.reset(cache)
    other = [len(scene.lengths) - 1 - i for i in members]
    found = runner.forward(scene.inputs(other), cache).clone()
    context.check("other sequences give other logits", not torch.equal(found, before))


def _growth(context: Context, runner: Any, capture: Any, scene: Scene, cache: KvCache) -> None:
    """Memory before and after many replays of changing batches."""
    sizes = runner.captured_sizes
    batches = [scene.inputs(list(range(s))) for s in sizes]
    for inputs in batches:
        runner.forward(inputs, cache)
    before = capture.used_bytes()
    count = 20 if context.tiny else REPLAYS
    started = time.perf_counter()
    for i in range(count):
        runner.forward(batches[i % len(batches)], cache)
    after = capture.used_bytes()
    context.check(f"no growth over {count} replays", after <= before, f"{after - before} bytes")
    context.figure("replay, all sizes in turn", (time.perf_counter() - started) / count, "s")


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
