"""Split-KV decode attention against its definition in float64, on the cases that the kernels must survive."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from paged_scene import SINKS, SLOPES, Scene, relative_error
from torch import Tensor

from model_server.attention.backend import Alibi, AttentionLayer
from model_server.kernels.attention import decode_config, decode_plan
from model_server.kernels.attention.decode import paged_decode
from model_server.kernels.attention.decode_plan import NO_LIMIT, SplitRule, plan_decode

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def few_processors(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The interpreter runs one program after the other: no more than a small GPU would get."""
    if device.type == "cpu":
        monkeypatch.setattr(decode_config, "num_processors", lambda device: 2)


def decode(scene: Scene, layer: AttentionLayer, **options: Any) -> Tensor:
    """What the kernel makes of a scene of single queries; the output was NaN before."""
    rows = scene.cache.rows[0]
    config = decode_config.decode_config(
        layer, value_in_key=scene.shape.value_in_key, cache_dtype=rows.dtype, device=rows.device, **options
    )
    metadata = scene.metadata
    plan = decode_config.plan_rows(config, layer, metadata.kv_lengths, metadata.cu_seqlens_q, len(scene.batch))
    out = scene.query.new_full((len(scene.query), layer.num_heads * layer.value_dim), math.nan)
    keys, values = scene.cache.keys[0], scene.cache.values[0]
    paged_decode(scene.query, keys, values, metadata.block_tables, plan, layer, config, out=out)
    assert not plan.arrivals.any(), "a layer must leave the counters as it found them"
    return out


def check(scene: Scene, layer: AttentionLayer, **options: Any) -> None:
    assert relative_error(decode(scene, layer, **options), scene.expected(layer)) < LIMITS[scene.query.dtype]


def singles(*lengths: int) -> list[tuple[int, int]]:
    return [(1, n) for n in lengths]


@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
def test_lengths_around_a_page(page: int, device: torch.device) -> None:
    """The first token; one less than a page, exactly a page, one more; the same for two pages."""
    lengths = (1, page - 1, page, page + 1, 2 * page - 1, 2 * page, 2 * page + 1)
    scene = Scene(singles(*lengths), device, page=page)
    check(scene, scene.layer(), num_splits=2)


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_numbers_of_sequences(count: int, device: torch.device) -> None:
    """Ragged, and sharing their first page."""
    lengths = torch.randint(1, 120, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    scene = Scene(singles(*lengths), device, heads=(2, 1), shared=1)
    check(scene, scene.layer())


@pytest.mark.parametrize("num_splits", [1, 2, None, 64])
def test_numbers_of_splits(num_splits: int | None, device: torch.device) -> None:
    scene = Scene(singles(1, 700, 1300, 128), device, heads=(8, 1), dtype=torch.float16, dim=64)
    check(scene, scene.layer(), num_splits=num_splits)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1), (32, 1), (6, 2), (71, 1)], ids=str)
def test_heads_per_key_head(heads: tuple[int, int], device: torch.device) -> None:
    scene = Scene(singles(300, 40), device, heads=heads)
    check(scene, scene.layer(), num_splits=2)


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
    scene = Scene(singles(140, 33), device, heads=(4, 1), dim=dim, dtype=dtype)
    check(scene, scene.layer(scale=dim**-0.5), num_splits=2)


KINDS: dict[str, dict[str, Any]] = {
    "window of 1": {"window": 1},
    "window": {"window": 100},
    "window longer than all": {"window": 4096},
    "chunk": {"chunk": 128},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": Alibi(SLOPES[:4])},
    "alibi, rounded": {"alibi": Alibi(SLOPES[:4], 0.25)},
    "sinks": {"sinks": SINKS[:4]},
    "everything": {"window": 100, "softcap": 2.0, "alibi": Alibi(SLOPES[:4]), "sinks": SINKS[:4]},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_kinds_of_scores(kind: dict[str, Any], device: torch.device) -> None:
    scene = Scene(singles(1, 99, 100, 101, 128, 129, 400), device, value_dim=8)
    check(scene, scene.layer(**kind), num_splits=2)


def test_keys_out_of_reach_are_not_read(device: torch.device) -> None:
    """Blocks wholly before a window may have been given to somebody else."""
    scene = Scene(singles(400, 90), device)
    for options in ({"window": 20}, {"chunk": 64}):
        layer = scene.layer(**options)
        clean = decode(scene, layer)
        stored = scene.cache.rows[0].clone()
        for table, (_, total) in zip(scene.tables, scene.batch, strict=True):
            first = total - 20 if "window" in options else (total - 1) // 64 * 64
            scene.cache.keys[0][table[: first // 16].long().to(device)] = math.nan
        assert torch.equal(decode(scene, layer), clean)
        scene.cache.rows[0].copy_(stored)


@pytest.mark.parametrize("num_heads", [4, 40])
def test_values_inside_of_keys(num_heads: int, device: torch.device) -> None:
    """Latent attention: 576 numbers, of which 512 are the value."""
    scene = Scene(
        singles(130, 20), device, heads=(num_heads, 1), dim=576, value_dim=512, value_in_key=True, dtype=torch.bfloat16
    )
    check(scene, scene.layer(scale=0.07), num_splits=2)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_cache(cache_dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("no float8 e4m3 before 8.9")
    scene = Scene(singles(150, 17), device, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    check(scene, scene.layer(key_scale=0.5, value_scale=3.0), num_splits=2)


def test_rows_without_keys_give_zeros(device: torch.device) -> None:
    """The padding of a CUDA graph: no keys, or one in the reserved block."""
    scene = Scene(singles(0, 60, 0), device)
    layer = scene.layer()
    check(scene, layer)
    out = decode(scene, layer)
    assert not out[0].any() and not out[2].any()


def test_a_poisoned_sequence_stays_alone(device: torch.device) -> None:
    scene = Scene(singles(40, 300, 17), device)
    layer = scene.layer()
    clean = decode(scene, layer)
    scene.cache.keys[0][scene.tables[1, 3].item()] = math.nan
    poisoned = decode(scene, layer)
    assert torch.equal(poisoned[[0, 2]], clean[[0, 2]])
    assert poisoned[1].isnan().all()


def test_positions_beyond_131072(device: torch.device) -> None:
    """Distances and slots are whole numbers, not float16 or so."""
    scene = Scene(singles(131_200), device, heads=(1, 1), dim=16, page=256)
    check(scene, scene.layer(window=300, alibi=Alibi(SLOPES[:1])))


def test_a_row_has_the_same_bits_alone_and_in_a_batch(device: torch.device) -> None:
    lengths = (700, 3, 260, 900)
    scene = Scene(singles(*lengths), device)
    layer = scene.layer()
    together = decode(scene, layer, batch_invariant=True)
    for row in range(len(lengths)):
        alone = Scene(singles(lengths[row]), device)
        alone.cache, alone.query = scene.cache, scene.query[row : row + 1]
        alone.tables = scene.tables[row : row + 1]
        metadata = alone.metadata
        assert metadata.kv_lengths.tolist() == [lengths[row]]
        object.__setattr__(metadata, "block_tables", scene.metadata.block_tables[row : row + 1])
        assert torch.equal(decode(alone, layer, batch_invariant=True)[0], together[row])


@pytest.mark.parametrize(
    "rule",
    [SplitRule(37, 20, 37), SplitRule(None, 1, 5), SplitRule(None, 64, 16), SplitRule(3, 1, NO_LIMIT)],
    ids=["target", "fixed", "own length", "few"],
)
def test_plans_cover_each_key_once(rule: SplitRule, device: torch.device) -> None:
    check_plan(rule, {}, device)


@pytest.mark.parametrize("reach", [{"window": 50}, {"chunk": 64}], ids=["window", "chunk"])
def test_plans_cover_each_key_in_reach_once(reach: dict[str, int], device: torch.device) -> None:
    check_plan(SplitRule(37, 20, 37), reach, device)


def check_plan(rule: SplitRule, reach: dict[str, int], device: torch.device) -> None:
    """More sequences than are counted at once, some with several queries (no items), some without keys."""
    count = decode_plan._SEQUENCES_AT_ONCE + 9
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(0, 300, (count,), generator=generator, dtype=torch.int32)
    queries = torch.where(torch.rand(count, generator=generator) < 0.2, 3, 1).int()
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int32), queries.cumsum(0).int()))
    num_rows = int((queries == 1).sum())
    plan = plan_decode(
        lengths.to(device), cu_seqlens.to(device), num_rows=num_rows, tiles_per_row=2, rule=rule, unit=16, **reach
    )
    assert plan.arrivals.shape == (count, 2)
    assert not plan.arrivals.any()
    seen: dict[int, list[list[int]]] = {}
    for item in plan.items.tolist():
        if item[0] >= 0:
            seen.setdefault(item[0], []).append(item)
    assert sorted(seen) == [i for i in range(count) if queries[i] == 1]
    for sequence, items in seen.items():
        length = int(lengths[sequence])
        last = max(length - 1, 0)
        first = max(0, last + 1 - 50) if "window" in reach else last - last % 64 if "chunk" in reach else 0
        assert [item[4] for item in items] == list(range(len(items)))
        assert len(items) <= rule.max_splits
        for item in items:
            assert item[1] == cu_seqlens[sequence]
            assert item[5:7] == [len(items), length - 1]
            assert item[2] == first
            first = item[3]
        assert first == length
