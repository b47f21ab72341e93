"""A prompt has the same bits whatever part of it is cached, and however the rest is cut into chunks (C++ operators)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity.protocol import PagedBatch, prompts
from support.gguf_files import write_gguf
from support.loading import load
from support.quantized import quantize_folder
from support.tiny_models import tiny_checkpoint
from torch import Tensor

from model_server.attention.cpp import CppBackend
from model_server.cpp.library import library
from model_server.memory.kv_cache import KvCache
from model_server.runner.runner import Runner
from model_server.weights.gguf.prepare import prepare

pytestmark = pytest.mark.skipif(library() is None, reason="needs the C++ operators")

BLOCK = 16
# Beyond a span of keys (256), which decoding takes one by one.
LONGEST = 280
LENGTHS = [n for border in (16, 32, 256, 272) for n in range(border - 1, border + 3)]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
# Blocks in one call, blocks one by one: windows, softcaps, experts, short convolutions; quantized weights.
KINDS: dict[str, tuple[str, str, torch.dtype, str | None]] = {
    "llama": ("llama", "plain", FLOAT32, None),
    "llama bfloat16": ("llama", "plain", BFLOAT16, None),
    "llama float8 cache": ("llama", "plain", FLOAT32, "float8"),
    "windows": ("qwen2", "windows", BFLOAT16, None),
    "softcaps": ("gemma2", "plain", BFLOAT16, None),
    "experts": ("mixtral", "plain", FLOAT32, None),
    "experts bfloat16": ("qwen3_moe", "plain", BFLOAT16, None),
    "short convolutions": ("lfm2", "plain", BFLOAT16, None),
    "shared keys": ("gemma4_text", "plain", BFLOAT16, None),
    "experts beside": ("gemma4_text", "experts", FLOAT32, None),
    "sinks": ("gpt_oss", "plain", BFLOAT16, None),
    "chunks": ("llama4_text", "plain", FLOAT32, None),
    "ALiBi": ("bloom", "plain", BFLOAT16, None),
    "latents": ("deepseek_v3", "plain", BFLOAT16, None),
    "latents float32": ("deepseek_v2", "plain", FLOAT32, None),
    "latents of GLM": ("glm4_moe_lite", "plain", BFLOAT16, None),
    "latents of Mistral": ("mistral4", "plain", BFLOAT16, None),
    "sparse": ("deepseek_v32", "plain", BFLOAT16, None),
    "sparse of GLM": ("glm_moe_dsa", "shared", FLOAT32, None),
    "eetq": ("llama", "plain", BFLOAT16, "eetq"),
    "nf4": ("llama", "plain", FLOAT32, "bitsandbytes-nf4"),
    "gptq": ("llama", "plain", BFLOAT16, "gptq"),
    "gguf": ("llama", "plain", FLOAT32, "gguf"),
}
# States are of no use but at the position that they were saved at: cuts alone.
STATES: dict[str, tuple[str, str, torch.dtype, str | None]] = {
    "states": ("qwen3_5_text", "plain", FLOAT32, None),
    "Mamba-1": ("jamba", "dense", FLOAT32, None),
    "Mamba-2": ("bamba", "plain", FLOAT32, None),
    "states bfloat16": ("qwen3_5_text", "plain", BFLOAT16, None),
}

SOON = {"llama", "softcaps", "experts", "latents", "sparse", "gptq", "states bfloat16"}
CASES, CUT = (
    [pytest.param(kind, marks=() if kind in SOON else pytest.mark.long) for kind in kinds]
    for kinds in (KINDS, KINDS | STATES)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cached")


@cache
def runner_of(kind: str, folder: Path) -> Runner:
    model_type, variant, dtype, how = (KINDS | STATES)[kind]
    folder /= kind.replace(" ", "-")
    sizes = WIDE if how == "gguf" else {}
    path = tiny_checkpoint(model_type, folder / "source", variant=variant, **sizes)
    if how == "gguf":
        path = prepare(write_gguf(path, folder / "a.gguf", "Q4_K_M", folder / "decoded"), folder / "cache")
    if how == "gptq":
        path = quantize_folder(path, folder, "gptq")
    on_load = how if how in ("eetq", "bitsandbytes-nf4") else None
    return load(path, dtype=dtype, backend=CppBackend(), quantize=on_load)


def batch_of(kind: str, folder: Path, sequences: list[Tensor]) -> PagedBatch:
    runner, (_, _, dtype, how) = runner_of(kind, folder), (KINDS | STATES)[kind]
    batch = PagedBatch(runner, sequences, BLOCK, dtype)
    if how == "float8":
        batch.cache = KvCache(runner.kv_shapes, batch.cache.num_blocks, BLOCK, torch.float8_e4m3fn, torch.device("cpu"))
    return batch


def bits(cache: KvCache) -> list[Tensor]:
    """Of keys and values; a convolution keeps a block's newest inputs alone, those of the last step."""
    both = zip(cache.shapes, cache.rows, strict=True)
    return [rows.view(torch.uint8).clone() for shape, rows in both if shape.newest is None]


@pytest.mark.parametrize("kind", CASES)
def test_at_every_length_around_borders_of_blocks(kind: str, folder: Path) -> None:
    """Behind every prefix that may be cached: whole blocks. A token decoded after it has the same bits then, too."""
    [tokens] = prompts(400, [LONGEST])
    batch = batch_of(kind, folder, [tokens])
    [cold] = batch.step([LONGEST])
    written = bits(batch.cache)
    for length in LENGTHS:
        [alone] = batch_of(kind, folder, [tokens[:length]]).step([length])
        assert torch.equal(alone[-1], cold[length - 1]), f"a prompt of {length} tokens"
        for prefix in {(length - 1) // BLOCK * BLOCK, length // 2 // BLOCK * BLOCK, BLOCK}:
            if not 0 < prefix < length:
                continue
            batch.done = [prefix]
            [warm] = batch.step([length - prefix], prompts=[0])
            assert torch.equal(warm[-1], cold[length - 1]), f"{length} tokens behind {prefix}"
    for found, wanted in zip(bits(batch.cache), written, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.random
@pytest.mark.parametrize("kind", CUT)
@given(seed=st.integers(0, 2**32))
def test_however_it_is_cut(kind: str, seed: int, folder: Path) -> None:
    """In chunks, of one token too, beside those of others and beside rows that decode."""
    random = Random(seed)
    sequences = prompts(400, [random.randrange(2, 70) for _ in range(random.randrange(2, 5))], seed)
    lengths = [len(tokens) for tokens in sequences]
    wanted = []
    for tokens in sequences:  # the last of each is decoded
        alone = batch_of(kind, folder, [tokens])
        wanted.append([alone.step([len(tokens) - 1])[0][-1], alone.step([1])[0][-1]])
    batch = batch_of(kind, folder, sequences)
    while batch.done != lengths:
        of_prompts = [length - 1 - done for length, done in zip(lengths, batch.done, strict=True)]
        counts = [random.randint(0, min(n, 20)) if n > 0 else random.randint(0, n + 1) for n in of_prompts]
        if not any(counts):
            continue
        found = batch.step(counts, prompts=[i for i, n in enumerate(of_prompts) if n > 0])
        for i, (count, n) in enumerate(zip(counts, of_prompts, strict=True)):
            if count and count == n:
                assert torch.equal(found[i][-1], wanted[i][0])
            elif count and n == 0:
                assert torch.equal(found[i][-1], wanted[i][1])
