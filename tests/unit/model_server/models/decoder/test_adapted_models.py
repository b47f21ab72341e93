"""Mixed batches of LoRA adapters and the base model, with PEFT as the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import assert_equal_logits, prompts, run_protocol
from safetensors.torch import load_file
from support.adapters import write_adapter
from support.loading import load
from support.peft_adapters import peft_adapter, peft_logits
from support.quantized import quantize_folder
from support.tiny_models import tiny_checkpoint

from model_server.adapters.rows import BASE
from model_server.attention.backend import AttentionBackend
from model_server.attention.cpp import CppBackend
from model_server.attention.reference import ReferenceBackend
from model_server.cpp import library as cpp
from model_server.errors import StartupError

SEQUENCES = prompts(512)
LAST = ["q_proj", "k_proj", "v_proj", "o_proj"]
MIXED = (0, BASE, 1)

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
            ("opt", "plain", {}),
            ("bloom", "plain", {}),
            ("gpt_bigcode", "plain", {}),
            ("starcoder2", "plain", {}),
            ("qwen3_moe", "plain", {"target_modules": LAST}),
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


def test_a_quantized_base(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    source = tiny_checkpoint("llama", tmp_path / "source", with_tokenizer=False)
    quantized = quantize_folder(source, tmp_path, "gptq")
    adapter = peft_adapter(tmp_path / "plain", tmp_path / "adapter", 1)
    got = run_protocol(load(quantized, adapters={"a": adapter}), SEQUENCES, 4, adapters=(0, BASE, 0))
    wanted = [
        peft_logits(tmp_path / "plain", a, [s])[0] for a, s in zip((adapter, None, adapter), SEQUENCES, strict=True)
    ]
    assert_equal_logits(got, wanted)


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


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", with_tokenizer=False)
    key = "base_model.model.lm_head.lora_A.weight"
    adapter = write_adapter(tmp_path / "a", {"lm_head": (64, 512)}, tensors={key: torch.full((4, 64), float("nan"))})
    with pytest.raises(StartupError, match=rf"LoRA adapter `a`: tensor {key} holds numbers that are not finite"):
        load(model, adapters={"a": adapter})


def test_the_transformers_runner_takes_none(tmp_path: Path) -> None:
    model = tiny_checkpoint("mamba", tmp_path / "model", with_tokenizer=False)
    adapter = write_adapter(tmp_path / "a", {"lm_head": (64, 512)})
    with pytest.raises(StartupError, match="mamba is served by the transformers runner, which takes no LoRA adapters"):
        load(model, adapters={"a": adapter})
