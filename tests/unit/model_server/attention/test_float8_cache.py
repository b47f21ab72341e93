"""A cache in float8 on a CPU: every backend against the definition on the same bytes, and models over such a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import CHUNKS, CPU, STEPS, PagedBatch, assert_equal_logits, prompts, run_protocol
from safetensors.torch import load_file, save_file
from support.attention_scene import BATCHES, Scene
from support.loading import load
from support.tiny_models import tiny_checkpoint
from support.tiny_types import type_checkpoint

from model_server.attention.backend import Alibi, AttentionBackend
from model_server.attention.choice import AttentionChoice
from model_server.attention.reference import ReferenceBackend
from model_server.memory.kv_cache import FLOAT8
from model_server.models.decoder.decoder import Decoder

BACKENDS: list[AttentionBackend] = [ReferenceBackend(), AttentionChoice(None, CPU).for_layers()]
SLOPES = torch.tensor([0.7, 0.31, 0.011, 0.17])
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 8},
    "chunk": {"chunk": 8},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "alibi": {"alibi": Alibi(SLOPES)},
    "alibi, rounded": {"alibi": Alibi(SLOPES, 0.25)},
}


# Longer than a span of keys, than a block of them, and than a run of queries.
LONG = {"decode": [(1, 700), (1, 256), (1, 257), (1, 3)], "mixed": [(1, 600), (140, 400), (2, 131), (129, 129)]}


def stored_scene(
    batch: list[tuple[int, int]],
    cache: torch.dtype,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
) -> Scene:
    """Keys and values that float8 holds, and a query of its own type."""
    scene = Scene(batch, *heads, 4, cache, dims[1], dim=dims[0])
    scene.query = scene.query.float().to(dtype)
    scene.new_key, scene.new_value = scene.new_key.to(dtype), scene.new_value.to(dtype)
    return scene


@pytest.mark.thinned(3)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("cache", FLOAT8, ids=str)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_equals_the_definition(
    batch: list[tuple[int, int]], cache: torch.dtype, options: dict[str, Any], backend: AttentionBackend
) -> None:
    """Scales are those of the keys and values that were stored."""
    scene = stored_scene(batch, cache)
    layer = scene.layer(key_scale=0.5, value_scale=3.0, **options)
    got = scene.attend(layer, backend)
    scene.keys = tuple(key.double() * 0.5 for key in scene.keys)
    scene.values = tuple(value.double() * 3.0 for value in scene.values)
    torch.testing.assert_close(got.double(), scene.expected(layer), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dims", [(128, 128), (24, 20)], ids=["wide", "odd"])
@pytest.mark.parametrize("cache", FLOAT8, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", LONG.values(), ids=LONG)
def test_sizes(batch: list[tuple[int, int]], dtype: torch.dtype, cache: torch.dtype, dims: tuple[int, int]) -> None:
    """More heads than are computed at once, on the backend that a CPU is given."""
    scene = stored_scene(batch, cache, dtype, (10, 1), dims)
    got = scene.attend(scene.layer(), BACKENDS[1])
    scene.keys, scene.values = (tuple(t.double() for t in part) for part in (scene.keys, scene.values))
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), scene.expected(scene.layer()), rtol=bound, atol=bound)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache", FLOAT8, ids=str)
def test_every_byte_is_read(cache: torch.dtype, dtype: torch.dtype, backend: AttentionBackend) -> None:
    """A query with one key gets its value: all numbers of the type, and NaN. Infinities are never stored."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where(codes.view(cache).float().isinf(), 0, codes).view(cache)
    scene = stored_scene([(1, 1), (1, 4)], cache, dtype, (2, 1), (256, 256))
    scene.cache.rows[0].zero_()
    scene.cache.values[0][int(scene.metadata.block_tables[0, 0]), 0, 0] = codes
    got = scene.attend(scene.layer(), backend)
    torch.testing.assert_close(got[0], codes.to(dtype).repeat(2), rtol=0, atol=0, equal_nan=True)
    assert not got[1].any(), "NaN of another sequence"


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_queries(dtype: torch.dtype, backend: AttentionBackend) -> None:
    scene = stored_scene(BATCHES["everything mixed"], torch.float8_e4m3fn, dtype)
    layer = scene.layer()
    got = scene.attend(layer, backend)
    assert got.dtype is dtype
    scene.keys, scene.values = (tuple(t.double() for t in part) for part in (scene.keys, scene.values))
    torch.testing.assert_close(got.double(), scene.expected(layer), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("cache", FLOAT8, ids=str)
@pytest.mark.parametrize("kind", ["llama", "mixtral", "gemma2", "bloom", "olmo"])
def test_a_prefix_that_was_stored_before_gives_what_recomputing_it_gives(
    kind: str, cache: torch.dtype, backend: AttentionBackend, tmp_path: Path
) -> None:
    """A prompt's own keys are read as they are stored, or its logits would depend on where it was cut. The last of the
    models is one of transformers' own."""
    native = kind != "olmo"
    if native:
        tiny_checkpoint(kind, tmp_path, with_tokenizer=False)
    else:
        type_checkpoint(kind, tmp_path)
    runner = load(tmp_path, backend=backend)
    assert isinstance(runner, Decoder) is native
    sequences = prompts(runner.vocab_size)
    whole = PagedBatch(runner, sequences, 4, cache).step([len(s) for s in sequences])
    for steps in (STEPS, CHUNKS):
        assert_equal_logits(run_protocol(runner, sequences, 4, cache, steps), whole, 1e-3)
    plain = PagedBatch(runner, sequences, 4).step([len(s) for s in sequences])
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(whole, plain, strict=True))
    assert 1e-3 < error < 0.8, "in float8 there is a difference, and no large one"


def with_scales(source: Path, target: Path, scale: float) -> Path:
    """The same model with scales of keys and values."""
    tensors = load_file(source / "model.safetensors")
    for index in range(4):
        for name in ("k_scale", "v_scale"):
            tensors[f"model.layers.{index}.self_attn.{name}"] = torch.tensor(scale)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def test_scales_of_the_checkpoint(tmp_path: Path) -> None:
    """Powers of two change no bit but where numbers are too small or too large; without them keys of 1e4 overflow."""
    source = tiny_checkpoint("llama", tmp_path / "a", with_tokenizer=False)
    scaled = with_scales(source, tmp_path / "b", 0.25)
    sequences, e4m3 = prompts(512), torch.float8_e4m3fn
    one = run_protocol(load(source, cache_dtype=e4m3), sequences, 4, e4m3)
    runner = load(scaled, cache_dtype=e4m3)
    assert isinstance(runner, Decoder)
    layer = runner._blocks[0].attention.layer  # type: ignore[attr-defined]
    assert (layer.key_scale, layer.value_scale) == (0.25, 0.25)
    for got, want in zip(run_protocol(runner, sequences, 4, e4m3), one, strict=True):
        assert float((got - want).abs().max() / want.abs().max()) < 0.1
    unread = load(scaled)
    assert_equal_logits(run_protocol(unread, sequences, 4), run_protocol(load(source), sequences, 4), 1e-6)
    e5m2 = torch.float8_e5m2
    ours, theirs = (run_protocol(load(folder, cache_dtype=e5m2), sequences, 4, e5m2) for folder in (scaled, source))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), "scales are for e4m3 only"
