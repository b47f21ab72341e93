"""Mixed batches of LoRA adapters and the base model, with PEFT as the reference."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import assert_equal_logits, prompts, run_protocol
from safetensors.torch import load_file
from support.adapters import write_adapter
from support.loading import load
from support.peft_adapters import peft_adapter, peft_logits
from support.thread_ranks import on_ranks
from support.tiny_models import tiny_checkpoint
from torch import Tensor

from model_server.adapters.rows import BASE
from model_server.attention.backend import AttentionBackend
from model_server.attention.cpp import CppBackend
from model_server.attention.reference import ReferenceBackend
from model_server.cpp import library as cpp
from model_server.distributed.group import ProcessGroup
from model_server.errors import StartupError

SEQUENCES = prompts(512)
LAST = ["q_proj", "k_proj", "v_proj", "o_proj"]
MIXED = (0, BASE, 1)

OF_GEMMA4 = [
    "q_proj", "k_proj", "o_proj", "up_proj", "per_layer_input_gate", "per_layer_projection",
    "per_layer_model_projection",
]  # fmt: skip
OF_KIMI = [
    "q_proj", "k_proj", "o_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "kv_a_proj_with_mqa",
    "kv_b_proj", "gate_proj", "up_proj", "down_proj",
]  # fmt: skip
OF_JAMBA = ["q_proj", "in_proj", "x_proj", "out_proj", "gate_proj", "up_proj", "down_proj"]
FAMILIES: list[Any] = [
    ("llama", "plain", {}),
    ("gpt2", "plain", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    ("phi3", "plain", {}),
    ("mixtral", "plain", {"target_modules": LAST}),
    *(
        pytest.param(name, variant, config, marks=pytest.mark.parity)
        for name, variant, config in (
            ("llama", "mqa", {}),
            ("qwen2", "plain", {}),
            ("qwen3", "plain", {}),
            ("gemma2", "plain", {}),
            ("cohere", "plain", {}),
            ("gpt_neox", "plain", {}),
            ("falcon", "plain", {}),
            ("granite", "plain", {}),
            ("olmo2", "plain", {}),
            (
                "qwen3_5_text",
                "plain",
                {"target_modules": ["q_proj", "v_proj", "in_proj_qkv", "in_proj_a", "in_proj_z"]},
            ),
            (
                "olmo_hybrid",
                "plain",
                {"target_modules": ["q_proj", "g_proj", "a_proj", "o_proj", "down_proj"]},
            ),
            ("kimi_linear", "plain", {"target_modules": OF_KIMI}),
            ("minimax", "plain", {"target_modules": ["q_proj", "o_proj", "qkv_proj", "output_gate", "out_proj"]}),
            ("jamba", "plain", {"target_modules": OF_JAMBA}),
            ("mamba2", "plain", {"target_modules": ["in_proj"]}),
            ("deepseek_v32", "plain", {"target_modules": ["q_b_proj", "wq_b", "wk", "weights_proj", "o_proj"]}),
            ("lfm2", "plain", {"target_modules": ["q_proj", "out_proj", "in_proj", "w1", "w2", "w3"]}),
            ("bamba", "plain", {"target_modules": ["q_proj", "in_proj", "out_proj", "gate_proj", "down_proj"]}),
            ("falcon_h1", "plain", {"target_modules": ["q_proj", "k_proj", "in_proj", "up_proj", "gate_proj"]}),
            ("granitemoehybrid", "dense", {"target_modules": ["v_proj", "in_proj", "input_linear", "output_linear"]}),
            ("granitemoehybrid", "plain", {"target_modules": ["in_proj", "input_linear", "output_linear"]}),
            ("nemotron_h", "plain", {"target_modules": ["q_proj", "in_proj", "up_proj", "down_proj"]}),
            ("opt", "plain", {}),
            ("bloom", "plain", {}),
            ("gpt_bigcode", "plain", {}),
            ("starcoder2", "plain", {}),
            ("qwen3_moe", "plain", {"target_modules": LAST}),
            ("gemma4_text", "plain", {"target_modules": OF_GEMMA4}),
            ("gemma4_text", "experts", {"target_modules": ["q_proj", "k_proj", "o_proj", "proj", "down_proj"]}),
            ("gpt_oss", "plain", {"target_modules": LAST}),
        )
    ),
]


@pytest.mark.parametrize(("model_type", "variant", "config"), FAMILIES)
def test_rows_of_two_adapters_and_none(model_type: str, variant: str, config: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = tiny_checkpoint(model_type, tmp_path / "model", variant=variant, with_tokenizer=False)
    first = peft_adapter(model, tmp_path / "first", 1, **config)
    second = peft_adapter(model, tmp_path / "second", 2, **{**config, "r": 6, "use_rslora": True})
    got = run_protocol(load(model, adapters={"a": first, "b": second}), SEQUENCES, 4, adapters=MIXED)
    wanted = [peft_logits(model, a, [s])[0] for a, s in zip((first, None, second), SEQUENCES, strict=True)]
    assert_equal_logits(got, wanted)
    assert float((wanted[0] - peft_logits(model, None, SEQUENCES[:1])[0]).abs().max()) > 0.1


def test_some_layers_patterns_and_the_head(tmp_path: Path) -> None:
    """Modules that only one of two adapters has, ranks and alphas by pattern, and a head: tied, it becomes its own."""
    pytest.importorskip("peft")
    model = tiny_checkpoint("llama", tmp_path / "model", variant="biases_tied", with_tokenizer=False)
    first = peft_adapter(
        model, tmp_path / "first", 1, target_modules=["v_proj", "down_proj"], layers_to_transform=[0, 3],
        rank_pattern={"down_proj": 2}, alpha_pattern={r"layers\.3\.self_attn\.v_proj": 40},
    )  # fmt: skip
    second = peft_adapter(model, tmp_path / "second", 2, target_modules=["gate_proj", "lm_head"])
    got = run_protocol(load(model, adapters={"a": first, "b": second}), SEQUENCES, 4, adapters=MIXED)
    wanted = [peft_logits(model, a, [s])[0] for a, s in zip((first, None, second), SEQUENCES, strict=True)]
    assert_equal_logits(got, wanted)


CONSTRUCTS: list[Any] = [
    ("llama", "biases_tied", {"use_dora": True, "target_modules": ["embed_tokens", "k_proj", "down_proj", "lm_head"]}),
    ("llama", "biases_tied", {"lora_bias": True, "target_modules": ["q_proj", "o_proj"]}),
    ("llama", "biases_tied", {"target_modules": ["embed_tokens", "lm_head"]}),
    ("llama", "biases_tied", {"target_modules": ["q_proj"], "trainable_token_indices": [44, 9, 130]}),
    (
        "llama",
        "plain",
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [7], "lm_head": [5]}},
    ),
    ("llama", "biases_tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    *(
        pytest.param(name, variant, config, marks=pytest.mark.parity)
        for name, variant, config in (
            ("llama", "biases_tied", {"target_modules": ["lm_head"], "trainable_token_indices": [44, 9]}),
            ("llama", "biases_tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
            ("gpt2", "plain", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}),
            ("llama", "plain", {"use_dora": True}),
            ("phi3", "plain", {"use_dora": True}),
            ("gpt_neox", "plain", {"use_dora": True}),
            ("gemma2", "plain", {"target_modules": ["embed_tokens", "v_proj"], "use_dora": True}),
            ("opt", "plain", {"use_dora": True, "target_modules": ["q_proj", "fc2"]}),
            ("mixtral", "plain", {"target_modules": LAST, "use_dora": True}),
        )
    ),
]


@pytest.mark.parametrize(("model_type", "variant", "config"), CONSTRUCTS)
def test_lengths_biases_embeddings_and_rows(
    model_type: str, variant: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """DoRA, `lora_bias`, adapters and new rows of the embedding and the head: beside a plain adapter, and merged."""
    pytest.importorskip("peft")
    model = tiny_checkpoint(model_type, tmp_path / "model", variant=variant, with_tokenizer=False)
    first = peft_adapter(model, tmp_path / "first", 1, **config)
    modules = {"target_modules": LAST} if model_type == "mixtral" else {}
    second = peft_adapter(model, tmp_path / "second", 2, fan_in_fan_out=config.get("fan_in_fan_out", False), **modules)
    sequences = [s.clone() for s in SEQUENCES]
    for sequence in sequences:
        sequence[1:5] = torch.tensor([7, 9, 44, 5])
    wanted = [peft_logits(model, a, [s])[0] for a, s in zip((first, None, second), sequences, strict=True)]
    runner = load(model, adapters={"a": first, "b": second})
    base = peft_logits(model, None, sequences[:1])[0]
    assert_equal_logits(run_protocol(runner, sequences, 4, adapters=MIXED), wanted)
    assert float((wanted[0] - base).abs().max()) > 0.1
    merged = run_protocol(load(model, merged=first), sequences, 4)
    assert_equal_logits(merged[:1], wanted[:1])


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True, "target_modules": ["embed_tokens", "q_proj", "o_proj", "down_proj", "lm_head"]},
        {"lora_bias": True, "target_modules": ["k_proj", "o_proj"], "trainable_token_indices": [44, 9, 500]},
        pytest.param(
            {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}, marks=pytest.mark.parity
        ),
    ],
)
def test_two_ranks_and_the_operator_of_all_layers(config: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = tiny_checkpoint("llama", tmp_path / "model", variant="biases_tied", with_tokenizer=False)
    adapter = peft_adapter(model, tmp_path / "adapter", 1, **config)
    wanted = [peft_logits(model, a, [s])[0] for a, s in zip((adapter, None, adapter), SEQUENCES, strict=True)]

    def logits(group: ProcessGroup | None, backend: AttentionBackend | None = None) -> list[Tensor]:
        runner = load(model, group=group, backend=backend, adapters={"a": adapter})
        return run_protocol(runner, SEQUENCES, 4, adapters=(0, BASE, 0))

    for of_rank in on_ranks(2, logits):
        assert_equal_logits(of_rank, wanted)
    if cpp.usable(torch.device("cpu"), torch.float32):
        assert_equal_logits(logits(None, CppBackend()), wanted)
    for of_rank in on_ranks(2, lambda group: run_protocol(load(model, group=group, merged=adapter), SEQUENCES, 4)):
        assert_equal_logits([of_rank[0], of_rank[2]], [wanted[0], wanted[2]])


def test_a_saved_matrix_with_too_many_other_rows(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", with_tokenizer=False, vocab_size=2000)
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    table[:1025] += 1
    adapter = write_adapter(tmp_path / "a", {}, tensors={"base_model.model.model.embed_tokens.weight": table})
    with pytest.raises(StartupError, match="changes 1025 rows of the base model's; 1024 are served at most; merge"):
        load(model, adapters={"a": adapter})
    assert load(model, merged=adapter) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_base_model_are_what_they_are_without_adapters(dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit, also where one C++ operator runs all layers."""
    model = tiny_checkpoint("llama", tmp_path / "model", with_tokenizer=False)
    adapter = write_adapter(tmp_path / "adapter", {"model.layers.1.mlp.up_proj": (64, 96), "lm_head": (64, 512)})
    backends: list[AttentionBackend] = [ReferenceBackend()]
    if cpp.usable(torch.device("cpu"), dtype):
        backends.append(CppBackend())
    for backend in backends:
        plain = run_protocol(load(model, dtype=dtype, backend=backend), SEQUENCES, 4, dtype)
        adapted = load(model, dtype=dtype, backend=backend, adapters={"a": adapter})
        for got, want in zip(run_protocol(adapted, SEQUENCES, 4, dtype), plain, strict=True):
            assert torch.equal(got, want)
        mixed = run_protocol(adapted, SEQUENCES, 4, dtype, adapters=(0, BASE, BASE))
        assert not torch.equal(mixed[0], plain[0])
        assert torch.equal(mixed[1], plain[1]) and torch.equal(mixed[2], plain[2])


def test_a_saved_copy_of_the_head_must_be_the_head(tmp_path: Path) -> None:
    """PEFT saves one beside the adapter of a tied head."""
    model = tiny_checkpoint("llama", tmp_path / "model", with_tokenizer=False)
    head = load_file(model / "model.safetensors")["lm_head.weight"]
    key = "base_model.model.lm_head.base_layer.weight"
    load(model, adapters={"a": write_adapter(tmp_path / "a", {"lm_head": (64, 512)}, tensors={key: head})})
    write_adapter(tmp_path / "a", {"lm_head": (64, 512)}, tensors={key: head * 2})
    with pytest.raises(StartupError, match=f"LoRA adapter `a`: tensor {key} replaces the base model's; only a copy of"):
        load(model, adapters={"a": tmp_path / "a"})


def test_an_adapter_of_another_model_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", with_tokenizer=False)
    other = write_adapter(tmp_path / "other", {"lm_head": (64, 512)}, base_model_name_or_path="org/Other-1B")
    same = write_adapter(tmp_path / "same", {"lm_head": (64, 512)}, base_model_name_or_path="org/Model")
    for _ in range(2):
        load(model, adapters={"other": other, "same": same})
    said = [record.getMessage() for record in caplog.records if "was made for" in record.getMessage()]
    assert said == [f"LoRA adapter `other` was made for org/Other-1B; it is served with {model}"]


def test_each_adapter_is_said_with_its_rank_and_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = tiny_checkpoint("llama", tmp_path / "model", with_tokenizer=False)
    load(model, adapters={name: write_adapter(tmp_path / name, {"lm_head": (64, 512)}) for name in ("a", "b")})
    said = [record.getMessage() for record in caplog.records if "rank" in record.getMessage()]
    assert said == [f"LoRA adapter `{name}`: rank 4, 0.0 MiB on all shards together" for name in ("a", "b")]


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", with_tokenizer=False)
    key = "base_model.model.lm_head.lora_A.weight"
    adapter = write_adapter(tmp_path / "a", {"lm_head": (64, 512)}, tensors={key: torch.full((4, 64), float("nan"))})
    with pytest.raises(StartupError, match=rf"LoRA adapter `a`: tensor {key} holds numbers that are not finite"):
        load(model, adapters={"a": adapter})
