"""Models with recurrent layers in GGUF files against transformers' models of the numbers that the files hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import CHUNKS, assert_equal_logits, prompts, run_protocol
from support.gguf_files import write_gguf
from support.loading import load
from support.tiny_models import tiny_checkpoint

from model_server.models.decoder.decoder import Decoder
from model_server.weights.gguf.prepare import prepare

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 64}
DELTA: dict[str, Any] = {
    **SIZES,
    # Two heads in a block of 256 columns.
    "linear_value_head_dim": 128,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
MAMBA2 = {**SIZES, "mamba_d_head": 64, "shared_intermediate_size": 256}
NEMOTRON = {**SIZES, "mamba_head_dim": 32, "moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 256}
MAMBA = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "time_step_rank": 32}
KIMI: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "linear_head_dim": 64,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {**SIZES, "head_dim": None, "block_multiple_of": 256}),
    "lfm2moe": ("lfm2_moe", {**SIZES, "head_dim": None, "moe_intermediate_size": 256, "routed_scaling_factor": 1.0}),
    "qwen3next": ("qwen3_next", {**DELTA, "mlp_only_layers": []}),
    "qwen35": ("qwen3_5_text", DELTA),
    "qwen35moe": ("qwen3_5_moe_text", DELTA),
    "granitehybrid": ("granitemoehybrid", {**MAMBA2, "head_dim": None, "position_embedding_type": None}),
    "granitehybrid dense": (
        "granitemoehybrid",
        {**MAMBA2, "head_dim": None, "position_embedding_type": None, "num_local_experts": 0},
    ),
    "falcon-h1": ("falcon_h1", {**MAMBA2, "mamba_d_ssm": 512, "mamba_rms_norm": False}),
    "jamba": ("jamba", {**SIZES, "head_dim": None, "mamba_d_state": 16, "mamba_dt_rank": 32}),
    "jamba dense": ("jamba", {**SIZES, "head_dim": None, "num_experts": 1, "attn_layer_period": 9}),
    "mamba": ("mamba", MAMBA),
    # Both have the same architecture; times of a width that has no blocks.
    "mamba of Falcon": ("falcon_mamba", {**MAMBA, "expand": 2, "time_step_rank": 16}),
    "mamba2": ("mamba2", {"hidden_size": 256, "num_hidden_layers": 4, "num_heads": 8, "head_dim": 64}),
    "kimi-linear": ("kimi_linear", KIMI),
    "glm-dsa": ("glm_moe_dsa", {**KIMI, "q_lora_rank": 256}),
    "glm-dsa shared": ("glm_moe_dsa", {**KIMI, "q_lora_rank": 256, "indexer_types": ["full", "shared"] * 2}),
    "nemotron_h": ("nemotron_h", {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mlp"]}),
    "nemotron_h_moe": ("nemotron_h", {**NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "moe"]}),
    "nemotron_h_moe latent": (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "moe"], "moe_latent_size": 128},
    ),
}
ALWAYS = [("lfm2", "Q4_K_M"), ("qwen35", "Q4_K_M"), ("jamba", "Q4_K_M"), ("kimi-linear", "Q4_K_M")]
ALL = [(case, mixture) for case in CASES for mixture in ("F16", "Q8_0", "Q4_K_M")]


@pytest.mark.parametrize(
    ("case", "mixture"), [pytest.param(*one, marks=() if one in ALWAYS else pytest.mark.parity) for one in ALL]
)
def test_logits_are_those_of_the_decoded_numbers(case: str, mixture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model_type, fields = CASES[case]
    fields = {name: value for name, value in fields.items() if value is not None}
    source = tiny_checkpoint(model_type, tmp_path / "source", **fields)
    file = write_gguf(source, tmp_path / "model.gguf", mixture, tmp_path / "decoded")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "decoded", dtype=torch.float32, attn_implementation="eager")
    sequences = prompts(model.config.vocab_size)
    with torch.inference_mode():
        logits = [model(input_ids=one.unsqueeze(0), use_cache=False).logits[0] for one in sequences]
    runner = load(prepare(file, tmp_path / "cache"))
    assert isinstance(runner, Decoder)
    # Delta nets of such large weights multiply what their decays are off by, which are read through a logarithm.
    tolerance = 5e-4 if case.startswith("qwen3") else 1e-4
    assert_equal_logits(run_protocol(runner, sequences, 4, steps=CHUNKS), logits, tolerance)
