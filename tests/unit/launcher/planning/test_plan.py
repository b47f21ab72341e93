"""Config + machine + model → plan: TGI's vectors, and ours where we differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation, LauncherError, NotEnoughCUDADevices
from launcher.planning.hardware import Gpu, Hardware
from launcher.planning.model_info import ModelInfo, from_config, read
from launcher.planning.plan import Endpoints, LaunchPlan, check_model, make_plan, resolve_num_shard
from launcher.planning.prefill import prefill_tokens
from launcher.planning.shown_plan import plan_rows, served_rows

ENDS = Endpoints(hostname="127.0.0.1", port=3000, uds_prefix="/run/x/shard", master_port=29500)
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
BIG = LLAMA | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
}  # fmt: skip
MIXTRAL = LLAMA | {
    "vocab_size": 32000, "max_position_embeddings": 32768, "num_experts_per_tok": 2, "num_local_experts": 8,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip


def machine(count: int = 0, card: str = "nvidia-h100", memory_mib: int | None = 81559, **more: Any) -> Hardware:
    gpus = tuple(Gpu(uuid=f"GPU-{index}", card=card, memory_mib=memory_mib) for index in range(count))
    return Hardware(gpus=gpus, cores=8, **more)


def plan(config: LauncherConfig, hardware: Hardware | None = None, info: ModelInfo | None = None) -> LaunchPlan:
    return make_plan(config, hardware or machine(), info, ENDS)


@pytest.mark.parametrize(
    ("model", "card", "memory_mib", "num_shard", "tokens"),
    [
        (LLAMA, "nvidia-h200", 143771, 1, 65791),
        (LLAMA, "nvidia-a10g", 23028, 1, 8315),
        (LLAMA, "unknown", 24564, 1, 4096),
        (LLAMA, None, None, 1, 4096),
        (BIG, "nvidia-h100", 81559, 4, 24383),
        (BIG, "nvidia-h100", 81559, 1, 6095),
        (MIXTRAL, "nvidia-a100", 81920, 2, 23720),
        (TINY, None, None, 1, 256),
        (TINY, "nvidia-h200", 143771, 1, 256),
        ({}, "nvidia-h200", 143771, 1, 4096),
        (None, "nvidia-h200", 143771, 1, 4096),
        ({"model_type": "qwen2_vl", "vision_config": {}}, None, None, 1, 10000),
        ({"model_type": "gemma3"}, None, None, 1, 8000),
    ],
)
def test_prefill_tokens_of_tgi(
    model: dict[str, Any] | None, card: str | None, memory_mib: int | None, num_shard: int, tokens: int
) -> None:
    hardware = machine(num_shard, card, memory_mib) if card else machine()
    info = None if model is None else from_config(model)
    assert prefill_tokens(LauncherConfig(), hardware, info, num_shard)[0] == tokens


def test_prefill_tokens_follow_the_operator() -> None:
    info = from_config(TINY)
    assert prefill_tokens(LauncherConfig(max_batch_prefill_tokens=9999), machine(), info, 1)[0] == 9999
    # A default is never larger than the operator's pool.
    assert prefill_tokens(LauncherConfig(max_batch_total_tokens=100), machine(), info, 1)[0] == 100


def test_prefill_tokens_fit_in_memory() -> None:
    tokens, reason, notes = prefill_tokens(
        LauncherConfig(cuda_memory_fraction=0.125), machine(1, "nvidia-h200", 143771), from_config(LLAMA), 1
    )
    assert 1 <= tokens < 65791
    assert "lowered" in notes[0] and "memory" in reason
    tokens, _, notes = prefill_tokens(LauncherConfig(), machine(1, "nvidia-h100", 100), from_config(BIG), 1)
    assert (tokens, "larger than the memory" in notes[0]) == (6095, True)
    quantized = from_config(LLAMA | {"quantization_config": {"quant_method": "gptq"}})
    assert prefill_tokens(LauncherConfig(), machine(1, "nvidia-h200", 100), quantized, 1)[0] == 65791


@pytest.mark.parametrize(
    ("sharded", "num_shard", "gpus", "heads", "expected"),
    [
        (None, None, 8, None, 8),
        (None, None, 3, None, 3),
        (None, None, 1, None, 1),
        (None, None, 0, None, 1),
        (None, None, 8, 12, 6),
        (None, None, 3, 32, 2),
        (False, None, 8, None, 1),
        (False, 4, 4, None, 4),
        (True, None, 4, None, 4),
        (True, 2, 4, None, 2),
        (None, 2, 0, 4, 2),
        (None, 4, 4, 32, 4),
        (None, 6, 0, 12, 6),
    ],
)
def test_num_shard(sharded: bool | None, num_shard: int | None, gpus: int, heads: int | None, expected: int) -> None:
    config = LauncherConfig(sharded=sharded, num_shard=num_shard)
    count, reason, notes = resolve_num_shard(config, machine(gpus), ModelInfo(num_heads=heads))
    assert count == expected
    assert reason
    surprising = (sharded is False and num_shard is not None) or (
        num_shard is None and sharded is None and count < gpus
    )
    assert bool(notes) is surprising


@pytest.mark.parametrize(
    ("sharded", "num_shard", "gpus", "heads", "error", "words"),
    [
        (True, None, 0, None, NotEnoughCUDADevices, ["only 0", "--num-shard"]),
        (True, None, 1, None, NotEnoughCUDADevices, ["only 1"]),
        (True, None, 3, 7, ArgumentValidation, ["divides", "7"]),
        (None, 4, 2, None, ArgumentValidation, ["--num-shard", "4", "2 GPUs visible"]),
        (None, 3, 0, 4, ArgumentValidation, ["--num-shard", "3", "4 attention heads", "use 1, 2 or 4"]),
        (None, 8, 0, 4, ArgumentValidation, ["8", "use 1, 2 or 4"]),
    ],
)
def test_num_shard_refused(
    sharded: bool | None, num_shard: int | None, gpus: int, heads: int | None,
    error: type[LauncherError], words: list[str],
) -> None:  # fmt: skip
    config = LauncherConfig(sharded=sharded, num_shard=num_shard)
    with pytest.raises(error) as caught:
        resolve_num_shard(config, machine(gpus), ModelInfo(num_heads=heads))
    assert all(word in str(caught.value) for word in words)


def test_the_numbers_that_work_are_named() -> None:
    """Not only lower ones; of the GPUs that there are."""
    info = ModelInfo(num_heads=9, num_kv_heads=3)
    for gpus, numbers in ((0, "1, 3 or 9"), (8, "1 or 3"), (2, "1")):
        with pytest.raises(ArgumentValidation, match=rf"9 attention heads and 3 KV heads; use {numbers}$"):
            resolve_num_shard(LauncherConfig(num_shard=2), machine(gpus), info)


@pytest.mark.parametrize(
    ("count", "kv_heads", "fits"),
    [(2, 8, True), (8, 2, True), (8, 8, True), (4, 1, True), (4, 6, False), (8, 3, False), (8, 12, False)],
)
def test_kv_heads_are_divided_or_kept_by_several(count: int, kv_heads: int, fits: bool) -> None:
    """The rule of `model_server.models.decoder.attention.multi_head.head_ranges`, said before anything is loaded."""
    info = ModelInfo(num_heads=24, num_kv_heads=kv_heads)
    if fits:
        assert resolve_num_shard(LauncherConfig(num_shard=count), machine(), info).value == count
        return
    with pytest.raises(ArgumentValidation, match=rf"`--num-shard` {count} .* 24 attention heads and {kv_heads} KV"):
        resolve_num_shard(LauncherConfig(num_shard=count), machine(), info)


def test_a_count_is_reduced_to_what_suits_the_kv_heads_too() -> None:
    count, _, notes = resolve_num_shard(LauncherConfig(), machine(4), ModelInfo(num_heads=24, num_kv_heads=6))
    assert count == 3
    assert "24 attention heads and 6 KV heads" in notes[0]


def test_the_model_server_has_the_same_rule() -> None:
    from types import SimpleNamespace

    from model_server.errors import StartupError
    from model_server.models.decoder.attention.multi_head import head_ranges

    for heads, kv_heads, count in ((24, 6, 4), (24, 3, 8), (24, 2, 8), (24, 8, 4), (24, 24, 3), (10, 2, 4)):
        spec: Any = SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads)
        group: Any = SimpleNamespace(size=count, rank=0)
        try:
            head_ranges(spec, group)
            served = True
        except StartupError:
            served = False
        try:
            resolve_num_shard(
                LauncherConfig(num_shard=count), machine(), ModelInfo(num_heads=heads, num_kv_heads=kv_heads)
            )
            planned = True
        except ArgumentValidation:
            planned = False
        assert planned is served, (heads, kv_heads, count)


def test_each_default_says_why() -> None:
    made = plan(LauncherConfig(), machine(2, "nvidia-h200", 143771), from_config(LLAMA))
    assert made.reasons == (
        "Number of shards: 2 (all visible GPUs)",
        "Default `max_batch_prefill_tokens` to 131072 (the model's positions)",
    )
    made = plan(LauncherConfig(max_batch_prefill_tokens=9))
    assert made.reasons == ("Number of shards: 1 (no visible GPU)",)
    made = plan(LauncherConfig(max_batch_total_tokens=99))
    assert made.reasons[1] == "Default `max_batch_prefill_tokens` to 99 (`--max-batch-total-tokens`)"


def test_a_quantized_checkpoint_is_refused_before_it_is_loaded() -> None:
    check_model("m", None)
    check_model("m", from_config(LLAMA))
    for field in ("quantization_config", "compression_config"):
        check_model("m", from_config(LLAMA | {field: {"quant_method": "gptq"}}))
        with pytest.raises(ArgumentValidation, match=r"^m is quantized with hqq, which is not served; served are"):
            check_model("m", from_config(LLAMA | {field: {"quant_method": "hqq"}}))


def test_cpu_shards_that_get_in_each_others_way() -> None:
    def notes(num_shard: int, threads: int | None) -> str:
        return " ".join(plan(LauncherConfig(num_shard=num_shard), machine(omp_num_threads=threads)).notes)

    assert notes(2, None) == notes(2, 4) == notes(1, 8) == ""
    assert "OMP_NUM_THREADS=8 makes 2 shards use 16 threads on 8 CPU cores" in notes(2, 8)
    assert "16 shards on 8 CPU cores" in notes(16, None)


def test_gpus_that_torch_cannot_use_are_told() -> None:
    assert "torch is built for CPUs only" in plan(LauncherConfig(), machine(unused_gpus=2)).notes[0]


def test_defaults_and_names() -> None:
    made = plan(LauncherConfig())
    assert (made.model_id, made.num_shard, made.on_gpu, made.compute_type) == ("bigscience/bloom-560m", 1, False, None)
    assert plan(LauncherConfig(max_input_length=5)).max_input_tokens == 5
    assert plan(LauncherConfig(max_input_tokens=6)).max_input_tokens == 6


@pytest.mark.parametrize(
    ("card", "compute_type"),
    [
        ("nvidia-h200", "2-nvidia-h200"),
        ("nvidia-h100-80gb-hbm3", "2-nvidia-h100-80fb-hbm3"),
        ("nvidia-a100-80gb-pcie", "2-nvidia-a100-sxm4-80gb"),
        ("", None),
    ],
)
def test_compute_type(card: str, compute_type: str | None) -> None:
    assert plan(LauncherConfig(), machine(2, card)).compute_type == compute_type


def test_warnings() -> None:
    notes = plan(LauncherConfig(max_total_tokens=500), info=from_config(TINY)).notes
    assert "--max-total-tokens" in notes[0] and "256" in notes[0]
    small = machine(2, shared_memory_bytes=64 << 20)
    assert any("/dev/shm has 64 MiB" in note for note in plan(LauncherConfig(), small).notes)
    assert plan(LauncherConfig()).notes == ()


def test_the_plan_can_be_shown() -> None:
    asked = LauncherConfig(model_id="m", revision="r", max_total_tokens=77, num_shard=2)
    rows = dict(plan_rows(plan(asked, machine(cpu="Some CPU", memory_bytes=8 << 30))))
    assert rows["model"] == "m @ r"
    assert rows["max total tokens"] == "77"
    assert rows["shards"] == "2 on CPU"
    assert (rows["devices"], rows["memory"]) == ("Some CPU, 8 cores", "8.0 GiB")
    assert rows["url"] == "http://127.0.0.1:3000"
    assert rows["family"] == "decided by the shard"
    asked = LauncherConfig(cuda_memory_fraction=0.5)
    rows = dict(plan_rows(plan(asked, machine(2, "nvidia-h200", 143771), from_config(LLAMA))))
    assert rows["devices"] == "0: nvidia-h200\n1: nvidia-h200"
    assert rows["memory"] == "140.4 GiB each, 50% of it to be used"
    for graphs, shown in (([], "default sizes"), ([0], "off"), ([8, 0, 16], "8, 16")):
        assert dict(plan_rows(plan(LauncherConfig(cuda_graphs=graphs), machine(1))))["cuda graphs"] == shown
    assert dict(plan_rows(plan(LauncherConfig(cuda_graphs=[8]))))["cuda graphs"] == "none on a CPU"
    assert rows["family"] == "llama, 32 layers, 32 heads (8 KV), 131072 positions"


@pytest.mark.parametrize(
    ("config", "gpus", "num_shard"),
    [
        ({"num_stage": 2}, 0, 2),
        ({"num_stage": 2, "num_shard": 2}, 0, 4),
        ({"num_stage": 2}, 8, 8),
        ({"num_stage": 3}, 8, 6),
        ({"num_stage": 4, "num_shard": 1}, 8, 4),
    ],
)
def test_stages_have_shards_of_their_own(config: dict[str, Any], gpus: int, num_shard: int) -> None:
    found = resolve_num_shard(LauncherConfig(**config), machine(gpus), from_config(LLAMA))
    assert found.value == num_shard and f"`--num-stage` {config['num_stage']}" in found.reason


@pytest.mark.parametrize(
    ("config", "gpus", "words"),
    [
        ({"num_stage": 2, "stage_layers": [20, 10, 2]}, 0, "`--stage-layers` names 3 stages, `--num-stage` is 2"),
        ({"stage_layers": [20, 12]}, 0, "`--num-stage` is 1"),
        ({"num_stage": 4}, 2, "`--num-stage` 4 is too many: 2 GPUs visible"),
        ({"num_stage": 33}, 0, "`--num-stage` 33: the model has only 32 layers"),
    ],
)
def test_stages_that_cannot_be(config: dict[str, Any], gpus: int, words: str) -> None:
    with pytest.raises(ArgumentValidation) as refused:
        resolve_num_shard(LauncherConfig(**config), machine(gpus), from_config(LLAMA))
    assert words in str(refused.value)


def test_a_model_that_embeds_has_no_cache(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "max_position_embeddings": 512, **sizes}))
    info = read(tmp_path)
    made = plan(LauncherConfig(max_total_tokens=64), machine(free_bytes=8 << 30), info)
    assert made.task == "embed" and made.memory.tokens is None
    assert made.notes == ("`--max-total-tokens`: without effect, as the model's task is embed",)
    assert not any("kv_cache" in reason for reason in made.reasons)
    rows = dict(plan_rows(made))
    assert rows["task"] == "embed" and not {"kv cache", "cuda graphs", "max batch total tokens"} & set(rows)
    served = dict(served_rows(made, {"max_input_length": 512, "max_batch_tokens": 4096, "max_concurrent_requests": 9}))
    assert (
        served["limits"] == "512 tokens in a text, 4096 in a step; 9 requests at once" and "KV" not in served["types"]
    )
    assert plan(LauncherConfig(task="generate"), info=info).task == "generate"
