"""Prefill attention on a cached prefix against its definition in float64, and both kernels behind the backend."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paged_scene import SINKS, SLOPES, Scene, relative_error
from torch import Tensor

from model_server.attention.backend import Alibi, AttentionLayer
from model_server.attention.reference import ReferenceBackend
from model_server.attention.triton_paged import TritonBackend, refuses
from model_server.kernels.attention import decode_config
from model_server.kernels.attention import prefill as paged_prefill
from model_server.kernels.attention.parts import SHARED_MEMORY, Tiles, Widths, widths_of
from model_server.kernels.attention.prefill import PrefillConfig, tile_list
from model_server.kernels.attention.prefill_choice import measured

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Small enough that short prompts have tiles of all kinds: outside, on the diagonal, at the window's beginning, open.
SMALL = Tiles(rows=16, keys=16, num_warps=4, num_stages=3)


@pytest.fixture(autouse=True)
def few_processors(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The interpreter runs one program after the other: no more than a small GPU would get."""
    if device.type == "cpu":
        monkeypatch.setattr(decode_config, "num_processors", lambda device: 2)


def prefill(scene: Scene, layer: AttentionLayer, tiles: Tiles | None = None) -> Tensor:
    """What the kernel makes of a scene; the output was NaN before."""
    rows, metadata = scene.cache.rows[0], scene.metadata
    config = paged_prefill.prefill_config(
        layer, value_in_key=scene.shape.value_in_key, cache_dtype=rows.dtype, device=rows.device
    )
    if tiles is not None:
        config = PrefillConfig(config.widths, tiles)
    listed = tile_list(
        metadata.query_lengths_host,
        metadata.kv_lengths_host,
        layer.num_heads // layer.num_kv_heads,
        config.tiles.rows,
        window=layer.window,
        chunk=layer.chunk,
    )
    out = scene.query.new_full((len(scene.query), layer.num_heads * layer.value_dim), math.nan)
    keys, values = scene.cache.keys[0], scene.cache.values[0]
    return paged_prefill.paged_prefill(
        scene.query, keys, values, metadata.block_tables, listed.to(rows.device), layer, config, out=out
    )


def check(scene: Scene, layer: AttentionLayer, tiles: Tiles | None = None) -> None:
    assert relative_error(prefill(scene, layer, tiles), scene.expected(layer)) < LIMITS[scene.query.dtype]


@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
def test_lengths_around_a_page(page: int, device: torch.device) -> None:
    """Whole prompts, and runs that end around a page on a prefix that ends around one."""
    batch = [(1, 1), (page - 1, page - 1), (page, page), (page + 1, page + 1), (3, page + 1), (page, 2 * page - 1)]
    scene = Scene(batch, device, page=page, heads=(2, 1))
    check(scene, scene.layer(), Tiles(rows=128, keys=64, num_warps=8, num_stages=3))


@pytest.mark.parametrize("batch", [[(64, 64)], [(5, 300)], [(33, 33), (1, 70), (2, 2), (17, 90), (1, 1)]], ids=str)
def test_small_tiles(batch: list[tuple[int, int]], device: torch.device) -> None:
    scene = Scene(batch, device, shared=0 if len(batch) > 1 else 1)
    check(scene, scene.layer(), SMALL)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1), (32, 1), (6, 2), (71, 1)], ids=str)
def test_heads_per_key_head(heads: tuple[int, int], device: torch.device) -> None:
    scene = Scene([(9, 40), (13, 13)], device, heads=heads)
    check(scene, scene.layer())


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        *((dim, torch.bfloat16) for dim in (64, 80, 96, 128, 256)),
        *((dim, torch.float16) for dim in (64, 128)),
        *((dim, torch.float32) for dim in (80, 256)),
    ],
    ids=str,
)
def test_head_dims(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    scene = Scene([(70, 150), (33, 33)], device, heads=(4, 1), dim=dim, dtype=dtype)
    check(scene, scene.layer(scale=dim**-0.5))


KINDS: dict[str, dict[str, Any]] = {
    "window of 1": {"window": 1},
    "window in a tile": {"window": 5},
    "window of tiles": {"window": 48},
    "window longer than all": {"window": 4096},
    "chunk of 1": {"chunk": 1},
    "chunk in a tile": {"chunk": 6},
    "chunk of tiles": {"chunk": 48},
    "chunk longer than all": {"chunk": 4096},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": Alibi(SLOPES[:4])},
    "alibi, rounded": {"alibi": Alibi(SLOPES[:4], 0.25)},
    "sinks": {"sinks": SINKS[:4]},
    "everything": {"window": 20, "softcap": 2.0, "alibi": Alibi(SLOPES[:4]), "sinks": SINKS[:4]},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_kinds_of_scores(kind: dict[str, Any], device: torch.device) -> None:
    scene = Scene([(40, 40), (20, 101), (1, 33)], device, value_dim=8)
    check(scene, scene.layer(**kind), SMALL)


def test_keys_out_of_reach_are_not_read(device: torch.device) -> None:
    """Blocks wholly before the first query's window may have been given to somebody else."""
    scene = Scene([(20, 200), (5, 90)], device)
    for options in ({"window": 20}, {"chunk": 64}):
        layer = scene.layer(**options)
        clean = prefill(scene, layer, SMALL)
        stored = scene.cache.rows[0].clone()
        for table, (count, total) in zip(scene.tables, scene.batch, strict=True):
            first = total - count
            lowest = first + 1 - 20 if "window" in options else first // 64 * 64
            scene.cache.keys[0][table[: lowest // 16].long().to(stored.device)] = math.nan
        assert torch.equal(prefill(scene, layer, SMALL), clean)
        scene.cache.rows[0].copy_(stored)


@pytest.mark.parametrize("num_heads", [4, 40])
def test_values_inside_of_keys(num_heads: int, device: torch.device) -> None:
    """Latent attention: 576 numbers, of which 512 are the value."""
    scene = Scene(
        [(5, 70), (9, 9)],
        device,
        heads=(num_heads, 1),
        dim=576,
        value_dim=512,
        value_in_key=True,
        dtype=torch.bfloat16,
    )
    check(scene, scene.layer(scale=0.07))


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_cache(cache_dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("no float8 e4m3 before 8.9")
    scene = Scene([(30, 150), (17, 17)], device, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    check(scene, scene.layer(key_scale=0.5, value_scale=3.0))


def test_a_poisoned_sequence_stays_alone(device: torch.device) -> None:
    scene = Scene([(20, 40), (9, 100), (17, 17)], device)
    layer = scene.layer()
    clean = prefill(scene, layer)
    scene.cache.keys[0][scene.tables[1, 3].item()] = math.nan
    poisoned = prefill(scene, layer)
    others = [*range(20), *range(29, 46)]
    assert torch.equal(poisoned[others], clean[others])
    assert poisoned[20:29].isnan().all()


def test_positions_beyond_131072(device: torch.device) -> None:
    scene = Scene([(5, 131_200)], device, heads=(1, 1), page=256)
    check(scene, scene.layer(window=300, alibi=Alibi(SLOPES[:1])))


def test_a_chunk_has_the_bits_of_the_whole(device: torch.device) -> None:
    """Keys are added up in the same order wherever a prompt is cut."""
    whole = Scene([(100, 100)], device)
    layer = whole.layer(window=50)
    expected = prefill(whole, layer, SMALL)
    for first, last in ((0, 37), (37, 90), (90, 100)):
        part = Scene([(last - first, last)], device)
        part.cache, part.query = whole.cache, whole.query[first:last]
        object.__setattr__(part.metadata, "block_tables", whole.metadata.block_tables)
        # The interpreter's products are numpy's, whose last bit depends on the row's place in its tile on some CPUs.
        allowed = 0.0 if device.type == "cuda" else 1e-6
        torch.testing.assert_close(prefill(part, layer, SMALL), expected[first:last], rtol=0, atol=allowed)


def test_expensive_tiles_come_first() -> None:
    tiles = tile_list((40, 1, 3), (40, 500, 300), 2, 16, window=100, skip_single=True)
    assert tiles.tolist() == [
        [2, 0, 41, 3, 300, 0, 0, 0],
        *([0, row, 0, 40, 40, 0, 0, 0] for row in (64, 48, 32, 16, 0)),
    ]


def test_what_is_refused() -> None:
    def layer(head_dim: int, value_dim: int, num_kv_heads: int = 1) -> AttentionLayer:
        return AttentionLayer(
            index=0, num_heads=4, num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=value_dim, scale=1.0
        )

    assert refuses(layer(256, 256)) is None
    assert refuses(layer(192, 128, 4)) is None
    assert refuses(layer(576, 512)) is None
    assert refuses(layer(512, 512)) == "has heads of 512 numbers, and the kernels hold 256"
    assert refuses(layer(576, 512, 2)) == "has heads of 576 numbers, and the kernels hold 256"


@pytest.mark.parametrize("seed", range(8))
def test_backend_equals_the_reference(seed: int, device: torch.device) -> None:
    """Random mixed batches, pages, heads and layers, two layers of a step that share no plan."""
    draw = random.Random(seed)
    kv_heads = draw.choice([1, 2, 3])
    batch = []
    for _ in range(draw.randint(1, 6)):
        total = draw.randint(1, 90)
        batch.append((draw.choice([1, 1, draw.randint(1, total)]), total))
    in_key = kv_heads == 1 and draw.random() < 0.5
    scene = Scene(
        batch,
        device,
        heads=(kv_heads * draw.choice([1, 2, 5]), kv_heads),
        dim=24,
        value_dim=16 if in_key else draw.choice([8, 24]),
        value_in_key=in_key,
        page=draw.choice([16, 32]),
        shared=draw.choice([0, 1]),
        seed=seed,
    )
    num_heads = scene.query.shape[1]
    everything: dict[str, Any] = {
        "window": draw.randint(1, 60),
        "softcap": 2.0,
        "alibi": Alibi(SLOPES[:num_heads]),
        "sinks": SINKS[:num_heads],
    }
    step = TritonBackend(batch_invariant=draw.random() < 0.5).start(scene.metadata, scene.cache)
    for options in ({k: v for k, v in everything.items() if draw.random() < 0.5}, {"chunk": draw.randint(1, 60)}):
        layer = scene.layer(**options)
        actual = scene.attend(step, layer)
        expected = scene.attend(ReferenceBackend().start(scene.metadata, scene.cache), layer)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_backend_is_ready_for_graphs(device: torch.device) -> None:
    """A step of single queries reads lengths and tables when its kernels run: the host's numbers do not count."""
    scene = Scene([(1, 60), (1, 200)], device)
    layer = scene.layer()
    metadata = scene.metadata
    lengths = metadata.kv_lengths.clone()
    object.__setattr__(metadata, "kv_lengths_host", (1, 1))
    metadata.kv_lengths.fill_(0)
    step = TritonBackend().start(metadata, scene.cache)
    metadata.kv_lengths.copy_(lengths)
    assert relative_error(scene.attend(step, layer), scene.expected(layer)) < 1e-5


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"window": 50, "softcap": 2.0}, {"chunk": 32}], ids=str)
def test_prompts_whose_tokens_see_ahead(options: dict[str, Any], device: torch.device) -> None:
    """Spans over borders of tiles, on a prefix and from a first token on, beside a prompt all of whose tokens see all
    of it, and causal rows."""
    scene = Scene([(1, 40), (50, 90), (33, 33), (20, 20)], device, heads=(4, 2))
    lasts = list(range(39, 40)) + list(range(40, 90)) + list(range(33)) + [19] * 20
    firsts = [-1] * 84 + [0] * 20
    for row, first, stop in ((1, 40, 47), (1, 50, 85), (51, 3, 20)):
        start = first - (40 if row == 1 else 0)
        lasts[row + start : row + start + stop - first] = [stop - 1] * (stop - first)
    reach = (torch.tensor(one, dtype=torch.int64, device=device) for one in (lasts, firsts))
    scene.metadata = dataclasses.replace(scene.metadata, **dict(zip(("last_keys", "first_keys"), reach, strict=True)))
    layer = scene.layer(**options)
    found, expected = (
        scene.attend(backend.start(scene.metadata, scene.cache), layer)
        for backend in (TritonBackend(batch_invariant=True), ReferenceBackend())
    )
    assert relative_error(found, expected.cpu().double()) < LIMITS[torch.float32]
    causal = dataclasses.replace(scene.metadata, last_keys=None, first_keys=None)
    other = scene.attend(ReferenceBackend().start(causal, scene.cache), layer)
    assert relative_error(other, expected.cpu().double()) > 0.01


@pytest.mark.parametrize("options", [{}, {"window": 9}], ids=str)
def test_texts_of_encoders(options: dict[str, Any], device: torch.device) -> None:
    """All tokens see their whole text, or a window both ways, and no first key is given."""
    lengths = (1, 40, 7)
    scene = Scene([(length, length) for length in lengths], device, heads=(4, 4))
    ahead = options.get("window", max(lengths)) - 1
    lasts = [min(place + ahead, length - 1) for length in lengths for place in range(length)]
    last_keys = torch.tensor(lasts, dtype=torch.int64, device=device)
    scene.metadata = dataclasses.replace(scene.metadata, last_keys=last_keys)
    layer = scene.layer(**options)
    found, expected = (
        scene.attend(backend.start(scene.metadata, scene.cache), layer)
        for backend in (TritonBackend(batch_invariant=True), ReferenceBackend())
    )
    assert relative_error(found, expected.cpu().double()) < LIMITS[torch.float32]


@pytest.mark.interpreter
@pytest.mark.parametrize("faster", [0, 1])
def test_the_tiles_that_are_faster_are_used(faster: int, device: torch.device) -> None:
    """Both candidates of the largest GPUs run, on the same prompt, and give the same."""
    layer = AttentionLayer(index=0, num_heads=2, num_kv_heads=1, head_dim=128, value_dim=128, scale=0.1)
    widths = widths_of(layer, value_in_key=False)
    tiles = paged_prefill.prefill_tiles(widths, 2, SHARED_MEMORY[9, 0])
    assert [(t.rows, t.keys, t.num_stages) for t in tiles] == [(128, 128, 3), (128, 64, 5)]
    results: list[Tensor] = []

    def timer(run: Callable[[], object]) -> float:
        result = run()
        assert isinstance(result, Tensor)
        results.append(result.clone())
        return 1.0 if len(results) == faster + 1 else 1.2

    configs = [PrefillConfig(widths, t) for t in tiles]
    chosen, times = measured(configs, layer, 16, torch.bfloat16, device, timer, num_tokens=150)
    assert chosen is configs[faster] and times[faster] == 1.0
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=2e-2)


@pytest.mark.interpreter
def test_a_gain_within_the_noise_changes_nothing(device: torch.device) -> None:
    layer = AttentionLayer(index=0, num_heads=2, num_kv_heads=1, head_dim=128, value_dim=128, scale=0.1)
    widths = widths_of(layer, value_in_key=False)
    configs = [PrefillConfig(widths, t) for t in paged_prefill.prefill_tiles(widths, 2, SHARED_MEMORY[9, 0])]
    times = iter([1.0, 0.98])
    assert measured(configs, layer, 16, torch.bfloat16, device, lambda run: next(times))[0] is configs[0]


@pytest.mark.parametrize(
    ("dim", "itemsize", "capability", "count"),
    [(128, 2, (9, 0), 2), (128, 2, (8, 0), 1), (128, 2, (10, 0), 1), (64, 2, (9, 0), 1), (128, 1, (9, 0), 1)],
)
def test_candidates(dim: int, itemsize: int, capability: tuple[int, int], count: int) -> None:
    """Another is tried only where the first leaves keys with two buffers and half of them have three."""
    tiles = paged_prefill.prefill_tiles(Widths(dim, 0, dim), itemsize, SHARED_MEMORY[capability])
    assert len(tiles) == count
