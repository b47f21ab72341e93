"""An adapter merged into its base model, with PEFT as the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import assert_equal_logits, prompts, run_protocol
from safetensors.torch import load_file
from support.adapters import write_adapter
from support.gguf_files import write_gguf
from support.loading import load
from support.peft_adapters import peft_adapter, peft_logits
from support.quantized import quantize_folder
from support.tiny_models import tiny_checkpoint
from support.tiny_types import type_checkpoint
from torch import Tensor

from model_server.distributed.group import ProcessGroup
from model_server.errors import StartupError
from model_server.weights.gguf.prepare import prepare


class _OfTwo(ProcessGroup):
    size = 2


SEQUENCES = prompts(512)
HEAD = {"lm_head": (64, 512)}


def merged_logits(model: Path, adapter: Path) -> list[Tensor]:
    return run_protocol(load(model, merged=adapter), SEQUENCES, 4)


@pytest.mark.parametrize(
    ("model_type", "variant", "config"),
    [
        ("llama", "plain", {"rank_pattern": {"q_proj": 2}, "use_rslora": True}),
        ("llama", "biases_tied", {"target_modules": ["v_proj", "lm_head"]}),
        ("gpt2", "plain", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
        pytest.param("phi3", "plain", {}, marks=pytest.mark.parity),
    ],
)
def test_logits_are_those_of_peft(model_type: str, variant: str, config: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = tiny_checkpoint(model_type, tmp_path / "model", variant=variant, with_tokenizer=False)
    adapter = peft_adapter(model, tmp_path / "adapter", 1, **config)
    wanted = peft_logits(model, adapter, SEQUENCES)
    assert_equal_logits(merged_logits(model, adapter), wanted)
    assert float((wanted[0] - peft_logits(model, None, SEQUENCES[:1])[0]).abs().max()) > 0.1


@pytest.mark.parametrize("modules", [pytest.param("all-linear", marks=pytest.mark.parity), ["v_proj", "lm_head"]])
def test_a_model_that_transformers_computes(modules: str | list[str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    type_checkpoint("helium", tmp_path / "model", vocab_size=512, tie_word_embeddings=True)
    adapter = peft_adapter(tmp_path / "model", tmp_path / "adapter", 1, target_modules=modules)
    assert_equal_logits(merged_logits(tmp_path / "model", adapter), peft_logits(tmp_path / "model", adapter, SEQUENCES))
    with pytest.raises(StartupError, match="an adapter of helium is merged on one shard only: use --num-shard 1"):
        load(tmp_path / "model", merged=adapter, group=_OfTwo())


def test_other_adapters_are_served_on_top(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = tiny_checkpoint("llama", tmp_path / "model", with_tokenizer=False)
    adapter = peft_adapter(model, tmp_path / "adapter", 1)
    both = load(model, merged=adapter, adapters={"a": adapter})
    base = run_protocol(both, SEQUENCES, 4, adapters=(-1, -1, -1))
    assert_equal_logits(base, peft_logits(model, adapter, SEQUENCES))
    doubled = peft_adapter(model, tmp_path / "doubled", 1, lora_alpha=16)
    assert_equal_logits(run_protocol(both, SEQUENCES, 4, adapters=(0, 0, 0)), peft_logits(model, doubled, SEQUENCES))


def test_a_matrix_is_rounded_once(tmp_path: Path) -> None:
    """In bfloat16 the sum of a product that was rounded and the base model's would be another one."""
    model = tiny_checkpoint("llama", tmp_path / "model", with_tokenizer=False)
    adapter = write_adapter(tmp_path / "a", HEAD)
    factors = load_file(adapter / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.lm_head.lora_{name}.weight"] for name in "AB")
    runner: Any = load(model, merged=adapter, dtype=torch.bfloat16)
    base = load_file(model / "model.safetensors")["lm_head.weight"]
    got = runner._output.head(torch.eye(64, dtype=torch.bfloat16)).t()
    assert torch.equal(got.to(torch.bfloat16), (base.float() + 2 * b @ a).to(torch.bfloat16))


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "source", with_tokenizer=False)
    adapter = write_adapter(tmp_path / "a", HEAD)
    quantized = quantize_folder(source, tmp_path, "gptq")
    with pytest.raises(StartupError, match="is stored as gptq, into which no adapter can be merged: give the base mod"):
        load(quantized, merged=adapter)
    key = "base_model.model.lm_head.lora_A.weight"
    write_adapter(adapter, HEAD, tensors={key: torch.full((4, 64), float("inf"))})
    with pytest.raises(StartupError, match=rf"LoRA adapter `.*source`: tensor {key} holds numbers that are not finite"):
        load(source, merged=adapter)
    write_adapter(adapter, HEAD, tensors={"base_model.model.lm_head.base_layer.weight": torch.zeros(512, 64)})
    with pytest.raises(StartupError, match="replaces the base model's; only a copy of it is served"):
        load(source, merged=adapter)


def test_a_matrix_that_gguf_files_have_as_two(tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    source = tiny_checkpoint("kimi_linear", tmp_path / "source", **sizes)
    config = json.loads((source / "config.json").read_text())
    layer = config["layer_types"].index("full_attention")
    module = f"model.layers.{layer}.self_attn.kv_b_proj"
    adapter = write_adapter(tmp_path / "a", {module: (64, config["num_attention_heads"] * 64)})
    load(source, merged=adapter)
    folder = prepare(write_gguf(source, tmp_path / "model.gguf", "F16"), tmp_path / "cache")
    with pytest.raises(StartupError, match=rf"have {module} in other tensors, .* name the adapter in --lora-adapters"):
        load(folder, merged=adapter)
