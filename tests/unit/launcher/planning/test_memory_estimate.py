"""What weights and KV cache will take: as a shard that has loaded them counts, and by hand for larger models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.adapters import write_adapter
from support.quantized import quantize_folder
from support.thread_ranks import on_ranks
from support.tiny_models import tiny_checkpoint
from support.tiny_types import type_checkpoint

from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation
from launcher.planning.adapters import Listed, listed_folders, read_listed, slot_bytes
from launcher.planning.hardware import Gpu, Hardware
from launcher.planning.memory import dtype_of, estimate
from launcher.planning.model_info import ModelInfo, from_config, read
from launcher.planning.plan import Endpoints, LaunchPlan, make_plan
from launcher.planning.prefill import prefill_tokens
from launcher.planning.shown_plan import plan_rows
from model_server.attention.choice import AttentionChoice
from model_server.device import resolve_dtype
from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Ranks
from model_server.distributed.placement import Placement
from model_server.features.adapters.load import in_slots, with_adapters
from model_server.models.adapters.heads import AdaptedHeads
from model_server.models.load import load_runner
from model_server.models.model import describe
from model_server.runner.runner import Runner
from model_server.weights.checkpoint import examine
from wire.host import kv_memory

CPU = torch.device("cpu")
ENDS = Endpoints(hostname="127.0.0.1", port=3000, uds_prefix="/run/x/shard", master_port=29500)
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
NUMBERS = 8_030_261_248
VOCABULARY = 2 * 128256 * 4096
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
GGUF = {"quantization_config": {"quant_method": "gguf", "file_type": "IQ2_M", "growth": 1.5}}
NVFP4 = {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}}


def info(weight_bytes: int | None = 2 * NUMBERS, **more: Any) -> ModelInfo:
    return dataclasses.replace(from_config(LLAMA | more), weight_bytes=weight_bytes)


def gpus(count: int = 1, memory_mib: int = 24564) -> Hardware:
    card = Gpu(card="nvidia-l4", memory_mib=memory_mib, compute_capability=(8, 9))
    return Hardware(gpus=(card,) * count)


@pytest.mark.parametrize(
    ("quantize", "bits"),
    [
        (None, 0),
        ("eetq", 0),
        ("bitsandbytes", 0),
        ("bitsandbytes-nf4", 0),
        ("fp8", 0),
        pytest.param("gptq", 2, marks=pytest.mark.long),
        ("gptq", 4),
        pytest.param("gptq", 8, marks=pytest.mark.long),
    ],
)
def test_a_shard_takes_what_was_estimated(
    quantize: Literal["eetq", "bitsandbytes", "bitsandbytes-nf4", "fp8", "gptq"] | None, bits: int, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "plain")
    if quantize == "gptq":
        folder = quantize_folder(folder, tmp_path / "stored", "gptq", bits=bits)
    config = LauncherConfig(quantize=quantize, dtype="float32")
    expected = estimate(config, Hardware(), read(folder), 1)
    model = describe(examine(folder), quantize=quantize)
    placement = Placement(CPU, torch.float32)
    runner = load_runner(model, placement, AttentionChoice("reference", CPU))
    # Of a file this small the header is some 5 %, and counted as if it were weights.
    assert expected.weights == pytest.approx(runner.traits.weight_bytes, rel=0.15)
    assert expected.token == _token_bytes(runner)


@pytest.mark.parametrize("speculate", [None, 3, 15])
@pytest.mark.parametrize("world_size", [1, 2])
def test_short_convolutions_take_what_was_estimated(tmp_path: Path, world_size: int, speculate: int | None) -> None:
    folder = tiny_checkpoint("lfm2", tmp_path)
    config = LauncherConfig(dtype="float32", speculate=speculate)
    expected = estimate(config, Hardware(), read(folder), world_size)

    def load(group: ProcessGroup) -> Runner:
        placement = Placement(CPU, torch.float32, Ranks.of(group), num_drafted=speculate or 0)
        return load_runner(describe(examine(folder)), placement, AttentionChoice("reference", CPU))

    assert [_token_bytes(runner) for runner in on_ranks(world_size, load)] == [expected.token] * world_size


@pytest.mark.parametrize("variant", ["plain", "experts"])
def test_layers_of_several_sizes_take_what_was_estimated(tmp_path: Path, variant: str) -> None:
    folder = tiny_checkpoint("gemma4_text", tmp_path, variant=variant, with_tokenizer=False)
    for world_size in (1, 2):
        expected = estimate(LauncherConfig(dtype="float32"), Hardware(), read(folder), world_size)

        def load(group: ProcessGroup) -> Runner:
            placement = Placement(CPU, torch.float32, Ranks.of(group))
            return load_runner(describe(examine(folder)), placement, AttentionChoice("reference", CPU))

        assert [_token_bytes(runner) for runner in on_ranks(world_size, load)] == [expected.token] * world_size


@pytest.mark.parametrize(
    ("model_type", "variant"), [("deepseek_v32", "plain"), ("glm_moe_dsa", "plain"), ("glm_moe_dsa", "shared")]
)
def test_keys_of_indexers_take_what_was_estimated(tmp_path: Path, model_type: str, variant: str) -> None:
    """Every shard has all of them, beside the latents."""
    folder = tiny_checkpoint(model_type, tmp_path, variant=variant, with_tokenizer=False)
    for world_size in (1, 2):
        expected = estimate(LauncherConfig(dtype="float32"), Hardware(), read(folder), world_size)

        def load(group: ProcessGroup) -> Runner:
            placement = Placement(CPU, torch.float32, Ranks.of(group))
            return load_runner(describe(examine(folder)), placement, AttentionChoice("reference", CPU))

        assert [_token_bytes(runner) for runner in on_ranks(world_size, load)] == [expected.token] * world_size


def test_published_configs_of_sparse_attention_say_what_is_cached() -> None:
    """GLM 5.2's layers share what an indexer chose, by a frequency or a pattern."""
    sizes = {"num_hidden_layers": 78, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    for said, indexers in (
        ({}, 78),
        ({"index_topk_freq": 4}, 3 + 75 // 4),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 21),
        ({"index_topk_pattern": "F" * 6 + "FSSS" * 18}, 24),
        ({"index_topk_pattern": "FS"}, 0),
    ):
        found = from_config({"model_type": "glm_moe_dsa", **sizes, **said}).latent
        assert found is not None and found.cached(78) == 78 * 576 + indexers * 128
    old = from_config({"model_type": "deepseek_v3", **sizes}).latent
    assert old is not None and old.cached(78) == 78 * 576


@pytest.mark.parametrize("model_type", ["t5", "bart", "t5gemma"])
def test_an_encoder_decoder_takes_what_was_estimated(tmp_path: Path, model_type: str) -> None:
    """The keys of a prompt's token are those that the decoder's layers make of the encoder's output."""
    type_checkpoint(model_type, tmp_path)
    expected = estimate(LauncherConfig(dtype="float32"), Hardware(), read(tmp_path), 1)
    placement = Placement(CPU, torch.float32)
    runner = load_runner(describe(examine(tmp_path)), placement, AttentionChoice("reference", CPU))
    assert expected.token == _token_bytes(runner)


def test_published_files_say_the_sizes_of_full_layers_once() -> None:
    sizes = {"num_hidden_layers": 12, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512}
    more = {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "num_kv_shared_layers": 6}
    found = from_config({"model_type": "gemma4_text", **sizes})
    assert found.key_layers == (*((8, 256),) * 5, (8, 512)) * 2
    assert from_config({"model_type": "gemma4_text", **sizes, **more}).key_layers == (*((8, 256),) * 5, (2, 512))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", "bamba", "falcon_h1", "nemotron_h",
        "kimi_linear", "olmo_hybrid", "minimax", "jamba", "mamba", "falcon_mamba", "mamba2",
    ],
)  # fmt: skip
def test_states_take_what_was_estimated(tmp_path: Path, model_type: str, world_size: int) -> None:
    folder = tiny_checkpoint(model_type, tmp_path, with_tokenizer=False)
    expected = estimate(LauncherConfig(dtype="bfloat16"), Hardware(), read(folder), world_size)

    def load(group: ProcessGroup) -> Runner:
        placement = Placement(CPU, torch.bfloat16, Ranks.of(group))
        return load_runner(describe(examine(folder)), placement, AttentionChoice("reference", CPU))

    for runner in on_ranks(world_size, load):
        assert runner.traits.recurrent_bytes == expected.state > 0
        assert sum(shape.block_bytes(16, torch.bfloat16) for shape in runner.kv_shapes) // 16 == expected.token


def test_a_model_without_attention_that_does_not_fit_a_gpu_has_no_tokens_there(tmp_path: Path) -> None:
    folder = tiny_checkpoint("mamba", tmp_path, with_tokenizer=False)
    fits = dataclasses.replace(read(folder), weight_bytes=1 << 30)
    large = dataclasses.replace(fits, weight_bytes=54 << 30)
    assert estimate(LauncherConfig(), gpus(), fits, 1).tokens == kv_memory.UNCACHED_TOKENS
    assert estimate(LauncherConfig(), gpus(), large, 1).tokens == 0


QWEN35_27B = {
    "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24,
    "num_key_value_heads": 4, "head_dim": 256, "num_hidden_layers": 64, "vocab_size": 248320, "dtype": "bfloat16",
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip


def test_as_many_requests_run_as_have_room_for_their_states() -> None:
    found = dataclasses.replace(from_config(QWEN35_27B), weight_bytes=54 << 30)
    state = 48 * (48 * 128 * 128 * 4 + 10240 * 3 * 2)
    machine = Hardware(free_bytes=74 << 30)
    planned = estimate(LauncherConfig(), machine, found, 1)
    assert (planned.state, planned.token) == (state, 16 * 2 * 4 * 256 * 2)
    assert planned.requests == (20 << 30) // 5 // state == 27
    assert planned.cache == kv_memory.default_bytes((20 << 30) - 28 * state)  # slot 0 is no request's
    assert estimate(LauncherConfig(state_slots=3), machine, found, 1).requests == 3
    # What requests leave is for saved states.
    assert estimate(LauncherConfig(max_batch_size=3), machine, found, 1).requests == 27
    assert estimate(LauncherConfig(max_batch_size=30), machine, found, 1).requests == 30
    assert estimate(LauncherConfig(), Hardware(free_bytes=54 << 30), found, 1).requests == 4
    on_gpu = estimate(LauncherConfig(), gpus(memory_mib=81920), found, 1)
    free = (80 << 30) - (54 << 30)
    assert on_gpu.requests == free // 2 // state
    assert on_gpu.tokens == (free - (free // 2 // state + 1) * state) // (16 * 2 * 4 * 256 * 2)


def test_the_text_model_of_a_vision_model_is_estimated() -> None:
    text = dataclasses.replace(from_config(QWEN35_27B), weight_bytes=54 << 30)
    whole = from_config({"model_type": "qwen3_5", "vision_config": {}, "text_config": QWEN35_27B, "dtype": "bfloat16"})
    whole = dataclasses.replace(whole, weight_bytes=54 << 30)
    machine = Hardware(free_bytes=74 << 30)
    expected = estimate(LauncherConfig(), machine, text, 1)
    assert expected.state and expected.token
    assert estimate(LauncherConfig(), machine, whole, 1) == expected


def test_the_plan_tells_the_shards_how_many_states_have_room() -> None:
    found = dataclasses.replace(from_config(QWEN35_27B), weight_bytes=54 << 30)
    plan = make_plan(LauncherConfig(model_id="/m"), Hardware(free_bytes=74 << 30), found, ENDS)
    assert (plan.asked.state_slots, plan.asked.max_batch_size) == (27, None)
    assert any("Default `state_slots` to 27 (so many states take 3.9 GiB)" in r for r in plan.reasons)
    asked = LauncherConfig(model_id="/m", state_slots=5)
    assert make_plan(asked, Hardware(free_bytes=74 << 30), found, ENDS).asked.state_slots == 5


def _token_bytes(runner: Runner) -> int:
    return sum(shape.block_bytes(16, torch.float32) for shape in runner.kv_shapes) // 16


@pytest.mark.parametrize(
    ("config", "found", "weights"),
    [
        (LauncherConfig(), info(), 2 * NUMBERS),
        (LauncherConfig(dtype="float32"), info(), 4 * NUMBERS),
        (LauncherConfig(), info(4 * NUMBERS, torch_dtype="float32"), 2 * NUMBERS),
        (LauncherConfig(), info(5_700_000_000, **GPTQ), 5_700_000_000),
        (LauncherConfig(), info(17 * NUMBERS + 2 * VOCABULARY, **MXFP4), 17 * NUMBERS + 2 * VOCABULARY),
        (LauncherConfig(), info(9 * NUMBERS + 2 * VOCABULARY, **NVFP4), 9 * NUMBERS + 2 * VOCABULARY),
        (LauncherConfig(dtype="float32"), info(17 * NUMBERS + 2 * VOCABULARY, **MXFP4), 21 * NUMBERS + 2 * VOCABULARY),
        (LauncherConfig(dtype="float32"), info(9 * NUMBERS + 2 * VOCABULARY, **NVFP4), 13 * NUMBERS + 2 * VOCABULARY),
        (LauncherConfig(quantize="gptq"), info(5_700_000_000, **GPTQ), 5_700_000_000),
        (LauncherConfig(), info(3 * NUMBERS + 2 * VOCABULARY, **GGUF), 9 * NUMBERS // 2 + 2 * VOCABULARY),
        (LauncherConfig(quantize="fp8"), info(), VOCABULARY + NUMBERS + 5 * ((NUMBERS - VOCABULARY) // 4096)),
        (LauncherConfig(quantize="bitsandbytes-fp4"), info(), 2 * VOCABULARY + (NUMBERS - VOCABULARY) * 36 // 64),
        (LauncherConfig(), info(None), None),
    ],
)
def test_weights(config: LauncherConfig, found: ModelInfo, weights: int | None) -> None:
    assert estimate(config, gpus(), found, 1).weights == weights


@pytest.mark.parametrize(
    ("config", "found", "num_shard", "kind", "token"),
    [
        (LauncherConfig(), info(), 1, None, 2 * 32 * 8 * 128 * 2),
        (LauncherConfig(kv_cache_dtype="fp8_e5m2"), info(), 1, "fp8_e5m2", 2 * 32 * 8 * 128),
        (LauncherConfig(), info(), 4, None, 2 * 32 * 2 * 128 * 2),
        (LauncherConfig(), info(), 16, None, 2 * 32 * 1 * 128 * 2),
        (LauncherConfig(), dataclasses.replace(info(), wants_float8_cache=True), 1, "fp8_e4m3fn", 2 * 32 * 8 * 128),
        (
            LauncherConfig(attention="flash_attn"),
            dataclasses.replace(info(), wants_float8_cache=True),
            1,
            None,
            2 * 32 * 8 * 128 * 2,
        ),
        (
            LauncherConfig(kv_cache_dtype="fp8_e5m2"),
            info(kv_lora_rank=512, qk_rope_head_dim=64),
            2,
            None,
            32 * 576 * 2,
        ),
        (LauncherConfig(), info(num_hidden_layers=None), 1, None, None),
    ],
)
def test_a_token_of_the_cache(
    config: LauncherConfig, found: ModelInfo, num_shard: int, kind: str | None, token: int | None
) -> None:
    result = estimate(config, gpus(num_shard), found, num_shard)
    assert (result.cache_type, result.token) == (kind, token)


def test_tokens_that_fit_beside_the_weights() -> None:
    plain = estimate(LauncherConfig(), gpus(), info(), 1)
    assert plain.tokens == ((24564 << 20) - 2 * NUMBERS) // (128 << 10)
    narrow = estimate(LauncherConfig(kv_cache_dtype="fp8_e4m3fn"), gpus(), info(), 1)
    assert plain.tokens is not None
    assert narrow.tokens in (2 * plain.tokens, 2 * plain.tokens + 1)
    half = estimate(LauncherConfig(cuda_memory_fraction=0.5), gpus(2), info(), 2)
    assert half.tokens == ((24564 << 19) - NUMBERS) // (64 << 10)
    assert estimate(LauncherConfig(), gpus(memory_mib=1000), info(), 1).tokens == 0
    assert estimate(LauncherConfig(), Hardware(), info(), 1).tokens is None
    assert estimate(LauncherConfig(), gpus(), None, 1).tokens is None


def cpu(free_gib: float, **more: Any) -> Hardware:
    return Hardware(free_bytes=int(free_gib * 2**30), **more)


TOKEN = 2 * 32 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("options", "free_gib", "num_shard", "longest", "tokens"),
    [
        ({}, 64, 1, 4096, (12 << 30) // TOKEN),  # 12 of the 49 GiB beside the weights
        ({}, 64, 2, 4096, (12 << 30) // TOKEN),
        ({"dtype": "float32"}, 64, 1, 4096, (8 << 30) // (2 * TOKEN)),
        ({"kv_cache_dtype": "fp8_e4m3fn"}, 64, 1, 4096, (24 << 30) // TOKEN),
        ({}, 10, 1, 4096, 16_000),  # less than the weights
        ({}, 10, 1, 20_000, 20_016),
        ({}, 2000, 1, 4096, 2**20),
        ({"kv_cache_memory": 1 << 30}, 2000, 1, 4096, (1 << 30) // TOKEN),
        ({"kv_cache_memory": 2 << 30, "nnodes": 2}, 2000, 4, 4096, (4 << 30) // TOKEN),
        ({"max_batch_total_tokens": 5000}, 64, 1, 4096, 4992),
        ({"max_batch_total_tokens": 5000, "kv_cache_memory": 1 << 30}, 64, 1, 4096, 4992),
        ({"max_batch_total_tokens": 50_000, "kv_cache_memory": 1 << 30}, 64, 1, 4096, (1 << 30) // TOKEN),
    ],
)
def test_tokens_in_the_memory_of_a_cpu(
    options: dict[str, Any], free_gib: float, num_shard: int, longest: int, tokens: int
) -> None:
    found = estimate(LauncherConfig(**options), cpu(free_gib), info(), num_shard, longest=longest)
    assert found.tokens == tokens


def test_memory_that_was_asked_for_bounds_the_cache_of_a_gpu() -> None:
    found = estimate(LauncherConfig(kv_cache_memory=1 << 30), gpus(2), info(), 2)
    assert (found.cache, found.tokens) == (1 << 29, (1 << 29) // (TOKEN // 2))
    assert estimate(LauncherConfig(kv_cache_memory=1 << 40), gpus(), info(), 1).tokens == (
        estimate(LauncherConfig(), gpus(), info(), 1).tokens
    )


@pytest.mark.parametrize("stored", ["BF16", "F16", "F32", "F64", None])
@pytest.mark.parametrize("has_instructions", [True, False])
def test_the_type_on_a_cpu_is_the_shards(
    stored: str | None, has_instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model_server.device.multiplies_bfloat16", lambda: has_instructions)
    monkeypatch.setattr("model_server.device.usable", lambda device, dtype: True)
    facts = ModelInfo(stored_type=stored)
    found = dtype_of(LauncherConfig(), facts, Hardware(multiplies_bfloat16=has_instructions))
    assert getattr(torch, found) == resolve_dtype(None, CPU, stored)


def test_a_small_cache_lowers_the_prefill_budget() -> None:
    tokens, reason, _ = prefill_tokens(LauncherConfig(kv_cache_memory=256 << 20), cpu(64), info(), 1)
    assert (tokens, reason) == (2048, "`--kv-cache-memory`")
    assert prefill_tokens(LauncherConfig(kv_cache_memory=4 << 30), cpu(64), info(), 1)[0] == 4096


def test_the_prefill_budget_counts_quantized_weights() -> None:
    """Beside 16 bits a weight of this model nothing would be left."""

    def budget(found: ModelInfo, **more: Any) -> tuple[int, bool]:
        tokens, _, notes = prefill_tokens(LauncherConfig(**more), gpus(memory_mib=14000), found, 1)
        return tokens, any("larger than the memory" in note for note in notes)

    assert budget(info())[1]
    stored, on_load = budget(info(5_700_000_000, **GPTQ)), budget(info(), quantize="eetq")
    assert not stored[1]
    assert not on_load[1]
    assert budget(info(5_700_000_000, **GPTQ), cuda_memory_fraction=0.5)[0] > 1


def test_the_plan_shows_them() -> None:

    def rows(found: ModelInfo | None, **more: Any) -> dict[str, str]:
        return dict(plan_rows(make_plan(LauncherConfig(**more), gpus(), found, ENDS)))

    shown = rows(info(5_700_000_000, **GPTQ), kv_cache_dtype="fp8_e5m2")
    assert shown["weights"] == "gptq, about 5.3 GiB in memory"
    assert shown["kv cache"] == "fp8_e5m2, 64.0 KiB a token"
    assert shown["max batch total tokens"] == "what fits (measured at warm-up), at most about 306048"
    assert rows(info(), quantize="eetq")["weights"] == "eetq on load, about 8.5 GiB in memory"
    assert rows(info())["weights"] == "plain, about 15.0 GiB in memory"
    assert rows(info(None, **GPTQ))["weights"] == "gptq"
    assert rows(None)["weights"] == "decided by the shard"
    assert rows(None)["kv cache"] == "the model's type"


def test_the_plan_of_a_cpu_says_what_the_shards_will() -> None:

    def planned(free_gib: float, found: ModelInfo | None = None, **more: Any) -> LaunchPlan:
        return make_plan(LauncherConfig(**more), cpu(free_gib), found or info(), ENDS)

    plan = planned(64)
    rows = dict(plan_rows(plan))
    assert rows["max batch total tokens"] == "98304"
    assert rows["kv cache"] == "the model's type, 128.0 KiB a token, 12.0 GiB"
    assert plan.reasons[-1] == (
        "Default `kv_cache_memory` to 98304 tokens, 12.0 GiB (25% of the 49.0 GiB that are free beside the weights; it "
        "is taken as it is first used)"
    )
    assert plan.notes == ()
    rows = dict(plan_rows(planned(64, num_shard=2)))
    assert rows["kv cache"] == "the model's type, 64.0 KiB a token and shard, 6.0 GiB a shard"
    assert "16000 tokens, 2.0 GiB (the least; " in planned(16).reasons[-1]
    assert planned(16).notes == (
        "the KV cache takes 2.0 GiB once it is full, but 1.0 GiB are free beside the weights: lower "
        "`--kv-cache-memory` or `--max-batch-total-tokens`, or use a smaller model",
    )
    unknown = planned(64, info(None))
    assert unknown.memory.cache is None
    assert dict(plan_rows(unknown))["max batch total tokens"] == "what fits (measured at warm-up)"
    with pytest.raises(
        ArgumentValidation, match=r"`--kv-cache-memory` 1\.0 MiB holds 0 tokens, and no request; a token"
    ):
        planned(64, kv_cache_memory=1 << 20)
    with pytest.raises(ArgumentValidation, match=r"holds 8192 tokens, and no request of `--max-total-tokens` 8190; "):
        planned(64, kv_cache_memory=1 << 30, max_total_tokens=8190)


def slots_taken(folder: Path, adapters: dict[str, Path], group: ProcessGroup, room: int = 0) -> int:
    """Bytes on one rank, of three slots of rank 16 where there can be as many adapters."""
    model = with_adapters(describe(examine(folder)), adapters, room=room, max_rank=16)
    placement = Placement(CPU, torch.float32, Ranks.of(group))
    runner: Any = load_runner(in_slots(model, 3), placement, AttentionChoice("reference", CPU))
    sites = runner.adapters
    parts = [part for site in sites._sites for part in _with_slots(site.linear) if part is not None]
    if sites._table is not None:
        parts.append(sites._table[0]._slots)
    return sum(t.nbytes for part in parts for t in vars(part).values() if isinstance(t, torch.Tensor))


def _with_slots(linear: Any) -> tuple[Any, ...]:
    return (linear,) if isinstance(linear, AdaptedHeads) else (linear._slots, linear._head)


@pytest.mark.parametrize(
    ("model_type", "count"),
    [
        ("llama", 1),
        ("llama", 2),
        ("mixtral", 1),
        ("qwen2_moe", 1),
        ("deepseek_v2", 1),
        ("deepseek_v3", 2),
        ("deepseek_v32", 2),
    ],
)
def test_slots_for_adapters_that_come_later_take_what_was_estimated(
    model_type: str, count: int, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(model_type, tmp_path / "model", with_tokenizer=False)
    config = LauncherConfig(lora_root=str(tmp_path), lora_slots=3, lora_max_rank=16)
    known = read(folder)
    assert known is not None
    expected = slot_bytes(config, known, count, 4)
    for found in on_ranks(count, lambda group: slots_taken(folder, {}, group, room=1)):
        assert found == pytest.approx(expected, rel=0.03)


def test_slots_of_a_vision_model_are_those_of_its_text_model() -> None:
    config = LauncherConfig(lora_root="/adapters")
    inner = {name: value for name, value in LLAMA.items() if name != "vocab_size"}
    vision = {"model_type": "llava", "vision_config": {"hidden_size": 1024}}
    for known in (vision | {"text_config": LLAMA}, vision | {"text_config": inner, "vocab_size": 128256}):
        assert slot_bytes(config, from_config(known), 2, 2) == slot_bytes(config, info(), 2, 2) > 0


@pytest.mark.parametrize("count", [1, 2])
def test_slots_for_listed_adapters_take_what_was_estimated(count: int, tmp_path: Path) -> None:
    """Those of the layers that one of them changes, and no more than there are adapters."""
    folder = tiny_checkpoint("llama", tmp_path / "model", with_tokenizer=False)
    layer = "model.layers.0.self_attn."
    bias = {f"base_model.model.{layer}o_proj.lora_B.bias": torch.zeros(64)}
    rows = {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.zeros(5, 64)}
    adapters = {
        "a": write_adapter(
            tmp_path / "a", {layer + "q_proj": (64, 64), layer + "o_proj": (64, 64)}, rank=10, tensors=bias
        ),
        "b": write_adapter(
            tmp_path / "b", {layer + "q_proj": (64, 64)}, tensors=rows, trainable_token_indices=[1, 2, 3, 4, 5]
        ),
    }
    config = LauncherConfig(lora_adapters=f"{adapters['a']},{adapters['b']}", lora_slots=64)
    known, listed = read(folder), read_listed(listed_folders(config, {}))
    assert known is not None and (listed.count, listed.rank) == (2, 10)
    expected = slot_bytes(config, known, count, 4, listed)
    for found in on_ranks(count, lambda group: slots_taken(folder, adapters, group)):
        assert found == pytest.approx(expected, rel=0.15 if count > 1 else 0.03)


def test_slots_for_experts_are_estimated(tmp_path: Path) -> None:
    """4 experts of rank 4: A [16, 96] and B [64, 16] for the downs; slots have a rank of 8."""
    outer = "base_model.model.model.layers.0.mlp.experts.lora_"
    made = {outer + "A.weight": torch.ones(16, 96), outer + "B.weight": torch.ones(64, 16)}
    config = LauncherConfig(lora_adapters=str(write_adapter(tmp_path / "a", {}, tensors=made)))
    assert slot_bytes(config, info(), 1, 2, read_listed(listed_folders(config, {}))) == 4 * 8 * (96 + 64) * 2


def test_what_cannot_be_read_of_adapters_counts_nothing(tmp_path: Path) -> None:
    """The shards say what is wrong with it."""
    folder = write_adapter(tmp_path / "a", {"lm_head": (64, 512)})
    config = LauncherConfig(lora_adapters=f"{folder},org/never-fetched")
    (folder / "adapter_config.json").write_text("[" * 100_000)
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    environ = {"HF_HUB_CACHE": str(tmp_path / "cache")}
    listed = read_listed(listed_folders(config, environ))
    assert listed == Listed(count=2)
    assert slot_bytes(config, info(), 1, 2, listed) == 0


def test_slots_leave_less_for_prefills() -> None:
    config = LauncherConfig(lora_root="/adapters", lora_slots=24)
    plain, beside = (prefill_tokens(one, gpus(), info(), 1)[0] for one in (LauncherConfig(), config))
    assert beside < plain
    listed = Listed(count=64, rank=256, inputs=2_000_000, outputs=2_000_000)
    config = LauncherConfig(lora_adapters="a=./a", lora_slots=64)
    assert (
        "model with 125000 MiB of slots for adapters seems" in prefill_tokens(config, gpus(), info(), 1, listed)[2][0]
    )


def test_slots_leave_less_for_the_cache() -> None:
    plain = estimate(LauncherConfig(), gpus(), info(), 1)
    beside = estimate(LauncherConfig(lora_root="/adapters"), gpus(), info(), 1)
    assert plain.tokens is not None and beside.tokens is not None and beside.token is not None
    assert 3.1e9 < (plain.tokens - beside.tokens) * beside.token < 3.3e9
