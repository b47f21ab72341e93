"""Configs of GGUF files: fields under transformers' names, rotations with the parameters that files only imply."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model_server.errors import StartupError
from model_server.weights.gguf.config import config_of, generation_of
from model_server.weights.gguf.header import GgufHeader
from model_server.weights.gguf.names import named_tensors
from model_server.weights.gguf.prepare import _write
from model_server.weights.header import Stored

LLAMA = {
    "embedding_length": 128, "block_count": 2, "feed_forward_length": 256, "attention.head_count": 4,
    "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 500000.0,
    "context_length": 4096,
}  # fmt: skip
NORMS = {f"blk.{number}.attn_norm.weight": Stored("F16", (128,), 0, 256) for number in range(6)}
EMBEDDING = {"token_embd.weight": Stored("F16", (1000, 128), 0, 256_000), **NORMS}

GRANITE: dict[str, Any] = {
    "block_count": 3, "attention__head_count_kv": [0, 2, 0], "attention__scale": 0.1, "embedding_scale": 2.0,
    "residual_scale": 0.5, "logit_scale": 3.0, "ssm__conv_kernel": 4, "ssm__state_size": 16, "ssm__group_count": 1,
    "ssm__time_step_rank": 8, "ssm__inner_size": 256,
}  # fmt: skip

MAMBA1: dict[str, Any] = {
    "ssm__conv_kernel": 4, "ssm__state_size": 16, "ssm__time_step_rank": 8, "ssm__inner_size": 256,
}  # fmt: skip


def header(name: str = "llama", tensors: dict[str, Stored] | None = None, **fields: Any) -> GgufHeader:
    values = {key.replace("__", "."): value for key, value in {**LLAMA, **fields}.items() if value is not None}
    given = {"general.architecture": name, **{f"{name}.{key}": value for key, value in values.items()}}
    return GgufHeader(given, {**EMBEDDING, **(tensors or {})})


def test_fields() -> None:
    found = config_of(header(), Path("a.gguf"))
    assert found == {
        "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "max_position_embeddings": 4096, "head_dim": 32, "vocab_size": 1000, "tie_word_embeddings": True,
        "dtype": "float16",
    }  # fmt: skip
    quantized = {"output.weight": Stored("Q6_K", (1000, 256), 0, 0)}
    found = config_of(header(tensors=quantized), Path("a.gguf"))
    assert found["tie_word_embeddings"] is False
    assert found["quantization_config"] == {"quant_method": "gguf", "file_type": "Q6_K", "growth": 1.0}
    assert found["dtype"] == "float16"
    plain = {"output.weight": Stored("F32", (1000, 128), 0, 512_000)}
    assert config_of(header(tensors=plain), Path("a.gguf"))["dtype"] == "float32"


@pytest.mark.parametrize(
    ("file_type", "name"), [(15, "Q4_K_M"), (14, "Q4_K_S"), (17, "Q4_K"), (None, "Q4_K"), ([1], "Q4_K")]
)
def test_the_name_of_a_mixture(file_type: object, name: str) -> None:
    mixed = header(tensors={"a": Stored("Q4_K", (1000, 2560), 0, 0), "b": Stored("Q6_K", (1000, 1280), 0, 0)})
    mixed = GgufHeader({**mixed.metadata, "general.file_type": file_type}, mixed.tensors)
    assert config_of(mixed, Path("a.gguf"))["quantization_config"]["file_type"] == name


def test_the_name_of_a_mixture_whose_embedding_is_most_of_it() -> None:
    sizes = {"token_embd.weight": ("Q8_0", 9000), "a": ("Q5_0", 2000), "b": ("Q4_K", 1000), "c": ("Q6_K", 500)}
    mixed = header(tensors={name: Stored(dtype, (rows, 256), 0, 0) for name, (dtype, rows) in sizes.items()})
    mixed = GgufHeader({**mixed.metadata, "general.file_type": 15}, mixed.tensors)
    assert config_of(mixed, Path("a.gguf"))["quantization_config"]["file_type"] == "Q4_K_M"


def test_what_low_bits_take_in_memory() -> None:
    kinds = {"a": Stored("IQ2_XXS", (256, 256), 0, 0), "b": Stored("Q4_K", (256, 256), 0, 0)}
    growth = config_of(header(tensors=kinds), Path("a.gguf"))["quantization_config"]["growth"]
    assert growth == round((5 + 4.5) / (66 * 8 / 256 + 4.5), 3)


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 2048)])
def test_llama3_s_parameters_are_found_in_the_factors(tmp_path: Path, factor: float, original: int) -> None:
    parameters = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, rope_parameters={"rope_theta": 500000.0, **parameters})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** -(torch.arange(0, 128, 2) / 128)
    path = tmp_path / "a.gguf"
    path.write_bytes(struct.pack("<64f", *(plain / scaled).tolist()))
    tensors = {"rope_freqs.weight": Stored("F32", (64,), 0, 256)}
    assert config_of(header(tensors=tensors), path)["rope_scaling"] == parameters
    path.write_bytes(struct.pack("<64f", *[factor, *[3.0] * 63]))
    with pytest.raises(StartupError, match="by factors that are not Llama 3's"):
        config_of(header(tensors=tensors), path)


def test_other_rotations(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(struct.pack("<4f", 1.0, 2.0, 3.0, 4.0))
    linear = header(rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert config_of(linear, path)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = header(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=512)
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert config_of(yarn, path)["rope_scaling"] == expected
    factors = {
        "rope_factors_short.weight": Stored("F32", (2,), 0, 8), "rope_factors_long.weight": Stored("F32", (2,), 8, 16)
    }  # fmt: skip
    phi3 = config_of(header("phi3", factors, rope__scaling__original_context_length=512), path)
    assert phi3["rope_scaling"] == {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    assert phi3["original_max_position_embeddings"] == 512
    assert phi3["sliding_window"] is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (header("rwkv7"), "is of the architecture 'rwkv7', which is not served from GGUF files; served are llama, "),
        (
            header("qwen3", expert_count=8),
            "architecture qwen3 and a mixture of experts, which is not served from GGUF files",
        ),
        (header("qwen3moe"), "architecture qwen3moe and no mixture of experts, which is not served from GGUF files"),
        (header(expert_count=8), "lacks the metadata `llama.expert_used_count`"),
        (header("olmo2", attention__sliding_window=4096), "the metadata `olmo2.attention.sliding_window`"),
        (header("granite"), "lacks the metadata `granite.attention.scale`"),
        (header("lfm2"), "lacks the metadata `lfm2.shortconv.l_cache`"),
        (header("qwen35", ssm__time_step_rank=0), "`ssm.time_step_rank` is 0; a positive whole number is expected"),
        (
            header("granitehybrid", **GRANITE, rope__scaling__finetuned=True),
            "the metadata `granitehybrid.rope.scaling.finetuned` with the value True, which is not served",
        ),
        (
            header("granitehybrid", **GRANITE | {"attention__head_count_kv": [0, 2, 4]}),
            "`granitehybrid.attention.head_count_kv` differs from layer to layer, which is not served",
        ),
        (header(block_count=2**31 - 1), "`llama.block_count` asks for 2147483647 layers, and there are fewer tensors"),
        (
            header("jamba", **MAMBA1, block_count=2**31 - 1),
            "`jamba.block_count` asks for 2147483647 layers, and there are fewer tensors",
        ),
        (
            header(attention__value_length=16, attention__value_length_mla=16),
            "the metadata `llama.attention.value_length` with the value 16, which is not served",
        ),
        (header(block_count=None), "lacks the metadata `llama.block_count`"),
        (header(rope__scaling__type="other"), "scales its rotations by 'other'"),
        (
            GgufHeader({"general.architecture": "llama"}, {}),
            "lacks the metadata `llama.embedding_length`",
        ),
    ],
)
def test_what_is_refused(given: GgufHeader, message: str) -> None:
    with pytest.raises(StartupError) as caught:
        config_of(given, Path("a.gguf"))
    assert message in str(caught.value)


def test_ids_that_end_a_text() -> None:
    texts = ["a", "<|eot_id|>", "<|im_end|>", "b"]
    tokens = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": [1, 3, 1, 1]}
    assert generation_of({"tokenizer.ggml.eos_token_id": 3, **tokens}) == {"eos_token_id": [3, 1]}
    assert generation_of({"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.bos_token_id": 0, **tokens}) == {
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip


def test_sampling_that_a_file_asks_for() -> None:
    stored = {"temp": struct.unpack("f", struct.pack("f", 0.6))[0], "top_k": 20, "min_p": 0.0, "penalty_last_n": 64}
    found = generation_of({f"general.sampling.{name}": value for name, value in stored.items()})
    assert found == {"temperature": 0.6, "top_k": 20, "min_p": 0.0}
    stored = {"top_p": struct.unpack("f", struct.pack("f", 0.95))[0], "penalty_repeat": 1.0}
    found = generation_of({f"general.sampling.{name}": value for name, value in stored.items()})
    assert found == {"top_p": 0.95, "repetition_penalty": 1.0}


_WRONG: list[Any] = [None, True, 0, -1, 2**40, 1.5, float("nan"), "x", "", [], [1], ["x"]]


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_metadata_of_any_type_is_served_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    """By what writes the folder of a file: whatever it makes of it can be read again."""
    path = tmp_path / "a.gguf"
    path.touch()
    plain = header(name)
    keys = [key.partition(".")[2] for key in plain.metadata if key.startswith(f"{name}.")]
    others = ["rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "expert_count",
              "rope.scaling.original_context_length", "attention.sliding_window_pattern", "rope.freq_base_swa",
              "attention.key_length", "attention.sliding_window", "attn_logit_softcapping",
              "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "attention.causal"]  # fmt: skip
    ours = ["general.architecture", "general.file_type", "general.sampling.temp", "tokenizer.ggml.tokens",
            "tokenizer.ggml.token_type", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
            "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"]  # fmt: skip
    num_refused = 0
    for key, wrong in itertools.product([f"{name}.{key}" for key in (*keys, *others)] + ours, _WRONG):
        given = GgufHeader({**plain.metadata, key: wrong}, EMBEDDING)
        reads = mock.patch("model_server.weights.gguf.prepare.read_gguf", return_value=given)
        with reads, pytest.raises(StartupError) as refused:  # there is never a whole tokenizer
            _write(path, _emptied(tmp_path / "made"))
        assert "\n" not in str(refused.value)
        if (tmp_path / "made" / "config.json").exists():
            config = json.loads((tmp_path / "made" / "config.json").read_text())
            assert all(type(config[field]) is int for field in ("hidden_size", "num_hidden_layers", "head_dim"))
        else:
            num_refused += 1
    assert num_refused > 100


def test_factors_that_are_no_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(struct.pack("<4f", *[float("nan")] * 4))
    given = header(tensors={"rope_freqs.weight": Stored("F32", (4,), 0, 16)})
    reads = mock.patch("model_server.weights.gguf.prepare.read_gguf", return_value=given)
    with reads, pytest.raises(StartupError, match="has metadata that contradicts itself"):
        _write(path, _emptied(tmp_path / "made"))


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def test_a_tensor_of_a_layer_that_no_model_has() -> None:
    with pytest.raises(StartupError, match="which is not served in its architecture"):
        named_tensors(header(tensors={f"blk.{'9' * 5000}.attn_q.weight": Stored("F16", (1, 1), 0, 2)}), Path("a.gguf"))


def test_yarn_with_bounds_and_a_factor_of_its_own() -> None:
    fields = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 16.0,
              "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.attn_factor": 0.5,
              "rope.scaling.yarn_attn_factor": 3.0}  # fmt: skip
    found = config_of(header(**fields), Path("a.gguf"))["rope_scaling"]
    assert found == {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0,
        "attention_factor": pytest.approx(1.5 * (1 + 0.1 * math.log(4.0))),
    }  # fmt: skip


def test_a_factor_without_a_kind_is_linear() -> None:
    found = config_of(header(**{"rope.scaling.factor": 4.0}), Path("a.gguf"))
    assert found["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", False), ("logit_scale", 0.25), ("attention.value_length", 16),
        ("use_parallel_residual", True),
        ("rope.scaling.yarn_ext_factor", 0.5), ("rope.scaling.attn_factor", 1.5),
    ],
)  # fmt: skip
def test_metadata_that_is_not_served_is_named(key: str, value: object) -> None:
    with pytest.raises(StartupError, match=rf"^a\.gguf has the metadata `(llama\.)?{key}`"):
        config_of(header(**{key: value}), Path("a.gguf"))


def test_layers_of_hybrids() -> None:
    found = config_of(header("granitehybrid", **GRANITE), Path("a.gguf"))
    assert found["layer_types"] == ["mamba", "attention", "mamba"]
    assert (found["mamba_d_head"], found["mamba_expand"], found["num_local_experts"]) == (32, 2, 0)
    nemotron = {
        **{key: value for key, value in GRANITE.items() if not key.endswith("scale")},
        "feed_forward_length": [0, 0, 256],
    }
    found = config_of(header("nemotron_h", **nemotron), Path("a.gguf"))
    assert found["layers_block_type"] == ["linear_attention", "full_attention", "mlp"]
    assert found["intermediate_size"] == 256


def test_layers_of_jamba() -> None:
    """Files say which layers attend, and config.json how far they are apart."""
    routers = {f"blk.{number}.ffn_gate_inp.weight": Stored("F32", (4, 128), 0, 2048) for number in (0, 2, 4)}
    metadata: dict[str, Any] = {**MAMBA1, "block_count": 6, "attention__head_count_kv": [0, 2, 0, 0, 2, 0]}
    found = config_of(header("jamba", routers, **metadata, expert_count=4, expert_used_count=2), Path("a.gguf"))
    assert (found["attn_layer_period"], found["attn_layer_offset"]) == (3, 1)
    assert (found["expert_layer_period"], found["expert_layer_offset"]) == (2, 0)
    assert (found["num_experts"], found["num_key_value_heads"], found["mamba_expand"]) == (4, 2, 2)
    found = config_of(header("jamba", **metadata, expert_count=4, expert_used_count=2), Path("a.gguf"))
    assert found["num_experts"] == 1
    metadata["attention__head_count_kv"] = [0, 2, 0, 2, 2, 0]
    with pytest.raises(ValueError, match=r"layers \[1, 3, 4\] of `jamba\.attention\.head_count_kv` do not follow each"):
        config_of(header("jamba", **metadata), Path("a.gguf"))
    for number in (5, 7):
        metadata["attention__head_count_kv"] = [0, 2, 0, 0, 2, 0, 0][:number]
        with pytest.raises(ValueError, match=rf"^`jamba\.attention\.head_count_kv` has {number} numbers for 6 layers$"):
            config_of(header("jamba", **metadata), Path("a.gguf"))


@pytest.mark.parametrize(("has_norms", "model_type"), [(False, "mamba"), (True, "falcon_mamba")])
def test_models_without_attention_have_no_sizes_of_it(has_norms: bool, model_type: str) -> None:
    without: dict[str, Any] = {"feed_forward_length": 0, "attention.head_count": 0, "attention.head_count_kv": None}
    given = header("mamba", **{**MAMBA1, **without, "rope.freq_base": None}, ssm__dt_b_c_rms=has_norms)
    found = config_of(given, Path("a.gguf"))
    assert found == {
        "model_type": model_type, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256,
        "layer_norm_epsilon": 1e-5, "conv_kernel": 4, "state_size": 16, "time_step_rank": 8,
        "max_position_embeddings": 4096, "vocab_size": 1000, "tie_word_embeddings": True, "dtype": "float16",
    }  # fmt: skip
    with pytest.raises(StartupError, match=r"^a\.gguf lacks the metadata `mamba\.ssm\.state_size`"):
        config_of(header("mamba", **{**MAMBA1, **without, "ssm__state_size": None}), Path("a.gguf"))


def test_heads_of_kimi_linear() -> None:
    """Files say how wide absorbed keys are, and that each layer with attention has one of them."""
    metadata: dict[str, Any] = {
        "attention__head_count_kv": [0, 1], "attention__key_length": 80, "attention__value_length": 72,
        "attention__key_length_mla": 48, "attention__value_length_mla": 24, "attention__kv_lora_rank": 64,
        "rope__dimension_count": 16, "kda__head_dim": 32, "ssm__conv_kernel": 4, "expert_count": 8,
        "expert_used_count": 2, "expert_feed_forward_length": 64, "expert_shared_count": 1,
        "leading_dense_block_count": 1, "expert_weights_scale": 2.5, "expert_gating_func": 2,
    }  # fmt: skip
    found = config_of(header("kimi-linear", **metadata), Path("a.gguf"))
    assert found["layer_types"] == ["linear_attention", "full_attention"]
    assert (found["qk_nope_head_dim"], found["qk_rope_head_dim"], found["v_head_dim"]) == (32, 16, 24)
    assert (found["kv_lora_rank"], found["linear_num_heads"], found["linear_head_dim"]) == (64, 4, 32)
    with pytest.raises(StartupError, match=r"`kimi-linear\.expert_gating_func` with the value 1, which is not served"):
        config_of(header("kimi-linear", **metadata | {"expert_gating_func": 1}), Path("a.gguf"))
    with pytest.raises(ValueError, match=r"^`kimi-linear\.attention\.head_count_kv` has 1 numbers for 2 layers$"):
        config_of(header("kimi-linear", **metadata | {"attention__head_count_kv": [1]}), Path("a.gguf"))
    for wrong in (16, 8, -1, True, 48.5, "48"):
        with pytest.raises(ValueError, match=r"^`kimi-linear\.attention\.key_length_mla` is .* above `rope\.dim"):
            config_of(header("kimi-linear", **metadata | {"attention__key_length_mla": wrong}), Path("a.gguf"))


def test_indexers_of_glm_5() -> None:
    metadata: dict[str, Any] = {
        "block_count": 4, "nextn_predict_layers": 1, "attention__head_count_kv": 1, "attention__key_length": 80,
        "attention__value_length": 64, "attention__key_length_mla": 48, "attention__value_length_mla": 24,
        "attention__kv_lora_rank": 64, "attention__q_lora_rank": 96, "rope__dimension_count": 16, "expert_count": 8,
        "expert_used_count": 2, "expert_feed_forward_length": 64, "expert_shared_count": 1,
        "leading_dense_block_count": 1, "expert_weights_scale": 2.5, "expert_gating_func": 2,
        "expert_weights_norm": True, "attention__indexer__head_count": 8, "attention__indexer__key_length": 32,
        "attention__indexer__top_k": 2048,
    }  # fmt: skip
    found = config_of(header("glm-dsa", **metadata), Path("a.gguf"))
    assert (found["index_n_heads"], found["index_head_dim"], found["index_topk"]) == (8, 32, 2048)
    assert (found["num_hidden_layers"], found["num_key_value_heads"], found["head_dim"]) == (3, 4, 16)
    assert "indexer_types" not in found
    metadata["attention__indexer__types"] = [True, False, True, True]
    found = config_of(header("glm-dsa", **metadata), Path("a.gguf"))
    assert found["indexer_types"] == ["full", "shared", "full"]
