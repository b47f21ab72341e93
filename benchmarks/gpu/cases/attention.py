"""S1, attention: the backend that serves on this device against float64, over the forms of models and batches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases.attention_alone import Scene, make_layer, make_scene
from benchmarks.gpu.cases.tally import Tally, limit_of, poison_memory
from benchmarks.gpu.context import Context
from model_server.attention.backend import Alibi, AttentionBackend
from model_server.attention.choice import AttentionChoice

Span = tuple[int, int]
# Query tokens that the float64 reference holds scores of at a time.
CHUNK = 256
# More numbers in one layer's cache than an int32 counts.
HUGE = 2**31


@dataclass(frozen=True, slots=True)
class Case:
    """One scene; `layer`: further fields of AttentionLayer, `alibi` and `sinks` as flags."""

    name: str
    spans: Sequence[Span]
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page: int = 16
    layer: dict[str, Any] = field(default_factory=dict)
    shared: bool = False  # all sequences read the first one's full blocks


def run_decode(context: Context) -> None:
    """Single queries."""
    _run(context, "paged decode", list(decode_cases(context.tiny)))
    if context.on_cuda and context.has_time(15):
        _huge_pool(context)


def run_prefill(context: Context) -> None:
    """Runs of queries, after cached tokens too, and mixed with single ones."""
    _run(context, "paged prefill", list(prefill_cases(context.tiny)))


def decode_cases(tiny: bool) -> Iterator[Case]:
    def ends(lengths: Sequence[int]) -> list[Span]:
        return [(n - 1, n) for n in lengths]

    small = {"heads": 4, "kv_heads": 2, "dim": 16} if tiny else {}
    ragged = ends([1, 15, 16, 17, 40] if tiny else [1, 15, 16, 17, 64, 1000, 1024, 1025, 8192])
    yield Case("ragged", ragged, **small)
    for count in (1, 2, 3) if tiny else (1, 2, 7, 64, 257):
        yield Case(f"{count} sequences", ends([7 + 13 * i % (40 if tiny else 900) for i in range(count)]), **small)
    for page in (32,) if tiny else (32, 64, 128, 256):
        yield Case(f"pages of {page}", ends([page - 1, page, page + 1, 3 * page]), page=page, **small)
    yield Case("shared pages", ends([48, 49, 60] if tiny else [512, 513, 600, 700]), shared=True, **small)
    for heads, kv_heads in ((4, 1),) if tiny else ((8, 8), (32, 8), (32, 4), (32, 1)):
        yield Case(
            f"{heads} heads, {kv_heads} of keys", ragged, heads=heads, kv_heads=kv_heads, dim=16 if tiny else 128
        )
    for dim in (32,) if tiny else (64, 80, 96, 256):
        yield Case(f"heads of {dim}", ragged, heads=8, kv_heads=2, dim=dim)
    for name, fields in _layers(tiny):
        yield Case(name, ragged, layer=fields, **small)


def prefill_cases(tiny: bool) -> Iterator[Case]:
    small = {"heads": 4, "kv_heads": 2, "dim": 16} if tiny else {}
    whole: list[Span] = [(0, n) for n in ((5, 17) if tiny else (1, 15, 16, 17, 300, 2048))]
    tails: list[Span] = [(16, 25), (30, 31), (0, 9)] if tiny else [(256, 300), (1000, 1513), (4095, 4096), (7, 2055)]
    yield Case("whole prompts", whole, **small)
    yield Case("tails after a cached prefix, and a decode row", tails, **small)
    for page in (32,) if tiny else (32, 64, 128, 256):
        yield Case(f"pages of {page}", [(0, page - 1), (page, 2 * page + 1)], page=page, **small)
    for heads, kv_heads in ((4, 1),) if tiny else ((8, 8), (32, 4), (32, 1)):
        yield Case(f"{heads} heads, {kv_heads} of keys", tails, heads=heads, kv_heads=kv_heads, dim=16 if tiny else 128)
    for dim in (32,) if tiny else (64, 80, 96, 256):
        yield Case(f"heads of {dim}", tails, heads=8, kv_heads=2, dim=dim)
    for name, fields in _layers(tiny):
        yield Case(name, [*whole[:2], *tails], layer=fields, **small)


def _layers(tiny: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "window", {"window": 9 if tiny else 300}
    yield "softcap", {"softcap": 20.0}
    yield "sinks", {"sinks": True}
    yield "ALiBi", {"alibi": True}
    yield "window and sinks", {"window": 12 if tiny else 128, "sinks": True}


def _run(context: Context, what: str, cases: list[Case]) -> None:
    """Every case in bfloat16, in float16 and float32 where time allows; first in order, then in random mixtures."""
    backend = AttentionChoice(None, context.device, torch.bfloat16).for_layers()
    tally = Tally(context, f"{what} ({backend.name})")
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        backend = AttentionChoice(None, context.device, dtype).for_layers()
        for case in cases:
            if not context.has_time(3):
                tally.left_out(f"{case.name} {dtype}")
                continue
            _case(context, tally, backend, case, dtype)
    chosen = random.Random(context.seed)
    while not context.tiny and context.has_time(8) and tally.count < 3 * len(cases) + 40:
        first, second = chosen.sample(cases, 2)
        mixed = Case(
            f"{first.name} + {second.name}", second.spans, first.heads, first.kv_heads, first.dim, second.page,
            {**second.layer, **first.layer},
        )  # fmt: skip
        backend = AttentionChoice(None, context.device, torch.bfloat16).for_layers()
        _case(context, tally, backend, mixed, torch.bfloat16)
    tally.tell()


def _case(context: Context, tally: Tally, backend: AttentionBackend, case: Case, dtype: torch.dtype) -> None:
    scene = _scene(context, case, dtype)
    poison_memory(context.device)
    found = scene.attend(backend)
    tally.compare(f"{case.name} {dtype}", found, expected(scene), limit_of(dtype))


def _scene(context: Context, case: Case, dtype: torch.dtype) -> Scene:
    fields = dict(case.layer)
    device = context.device
    if fields.pop("alibi", False):
        fields["alibi"] = Alibi(torch.rand(case.heads, device=device) * 0.2)
    if fields.pop("sinks", False):
        fields["sinks"] = torch.randn(case.heads, device=device)
    layer = make_layer(case.heads, case.kv_heads, case.dim, **fields)
    tables = None
    if case.shared:
        common = min(stop for _, stop in case.spans) // case.page
        tables, free = [], common + 1
        for _, stop in case.spans:
            own = -(-stop // case.page) - common
            tables.append([*range(1, common + 1), *range(free, free + own)])
            free += own
    return make_scene(layer, case.spans, case.page, dtype, device, tables=tables)


def expected(scene: Scene) -> Tensor:
    """Attention by its definition, in float64: [num_tokens, num_heads * value_dim]."""
    layer, metadata = scene.layer, scene.metadata
    size = scene.cache.block_size
    width = layer.num_kv_heads * layer.head_dim
    parts, first = [], 0
    lengths = zip(metadata.query_lengths_host, metadata.kv_lengths_host, strict=True)
    for row, (queries, length) in enumerate(lengths):
        positions = torch.arange(length, device=scene.query.device)
        slots = metadata.block_tables[row].long()[positions // size] * size + positions % size
        stored = scene.cache.rows[0].index_select(0, slots).double()
        key = stored[:, :width].view(length, layer.num_kv_heads, layer.head_dim)
        value = stored[:, width:].view(length, layer.num_kv_heads, layer.value_dim)
        query = scene.query[first : first + queries].double()
        for start in range(0, queries, CHUNK):
            piece = query[start : start + CHUNK]
            at = torch.arange(len(piece), device=piece.device) + length - queries + start
            parts.append(_attend(scene, piece, key, value, at))
        first += queries
    return torch.cat(parts)


def _attend(scene: Scene, query: Tensor, key: Tensor, value: Tensor, at: Tensor) -> Tensor:
    layer = scene.layer
    group = layer.num_heads // layer.num_kv_heads
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    distance = at[:, None] - torch.arange(len(key), device=at.device)[None]
    if layer.alibi is not None:
        scores = scores - layer.alibi.slopes.double()[:, None, None] * distance
    hidden = distance < 0
    if layer.window is not None:
        hidden = hidden | (distance >= layer.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.double()[:, None, None].expand(-1, len(query), 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def _huge_pool(context: Context) -> None:
    """Offsets that an int32 cannot hold: the sequences' blocks are the last of a pool beyond 2^31 numbers."""
    backend = AttentionChoice(None, context.device, torch.bfloat16).for_layers()
    size, layer = backend.block_size, make_layer(32, 8, 128)
    blocks = HUGE // (2 * 8 * 128) // size + 512
    free, _ = torch.cuda.mem_get_info(context.device)
    if free < 3 * blocks * size * 2 * 8 * 128 * 2:
        context.skip("a cache of more than 2^31 numbers", "not enough free memory")
        return
    tables = [list(range(blocks - 64 * (i + 1), blocks - 64 * i)) for i in range(3)]
    spans = [(1000, 1001), (17, 18), (0, 600)]
    tally = Tally(context, "a cache of more than 2^31 numbers")
    scene = make_scene(
        layer, spans, size, torch.bfloat16, context.device, tables=tables, num_blocks=blocks, poison=False
    )
    tally.compare("decode and prefill", scene.attend(backend), expected(scene), limit_of(torch.bfloat16))
    tally.tell()
