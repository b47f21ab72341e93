"""No field that transformers' modelling of a type reads is passed over.

It changes the Spec, is refused, or the tensors say the same.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from differential.compare import base_fields, with_change
from differential.fields import changes, read_by_modelling
from differential.known import TYPES

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.families import spec_of

# Tensors that are there or not say the same: `model_server.models.stated_parts` compares.
BY_TENSORS = {
    "attention_bias", "bias", "conv_bias", "enable_bias", "lm_head_bias", "mlp_bias", "qk_layernorm", "qkv_bias",
    "use_bias", "use_qk_norm", "use_qkv_bias", "add_cross_attention", "mamba_conv_bias", "mamba_proj_bias",
    "projectors_bias", "use_conv_bias",
}  # fmt: skip
# Read, but for no token;
# how many tokens a kernel takes at once, what begins or regularizes a training.
WITHOUT_EFFECT = {
    "pad_token_id", "router_jitter_noise", "num_logits_to_keep", "use_mamba_kernels", "mamba_chunk_size", "chunk_size",
    "z_loss_coefficient", "rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_min",
    "time_step_scale",
    "use_associative_scan", "use_mambapy",
    "linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min",
}  # fmt: skip
# Of a type: what its modelling reads and does not use, or reads under another name that its files have, too.
OF_TYPE = {
    "deepseek_v2": {"head_dim", "mlp_bias", "num_experts", "num_key_value_heads", "topk_group", "n_group"},
    "deepseek_v3": {"head_dim", "num_key_value_heads", "num_local_experts"},
    "deepseek_v32": {"head_dim", "num_key_value_heads", "num_local_experts"},
    "glm_moe_dsa": {"head_dim", "num_key_value_heads", "num_local_experts"},
    "bloom": {"num_hidden_layers"},
    "dbrx": {"head_dim", "max_position_embeddings", "num_attention_heads", "num_hidden_layers"},
    "gemma3_text": {"attn_logit_softcapping"},
    # Of its towers.
    "gemma4_text": {"attention_chunk_size", "hidden_act", "use_clipped_linears"},
    "glm4_moe_lite": {"head_dim", "num_key_value_heads"},
    "kimi_linear": {"num_key_value_heads"},
    "minimax": {"block_size"},  # tokens that are computed at once
    "nemotron_h": {"num_hidden_layers"},  # its kinds of layers are as many
    "mamba2": {"time_step_rank"},
    "mistral4": {"num_key_value_heads"},
    # How the sum of shared and chosen experts is rounded.
    "hy_v3": {"enable_moe_fp32_combine"},
    "gpt2": {"max_position_embeddings", "num_attention_heads", "num_hidden_layers"},
    "gpt_bigcode": {"max_position_embeddings", "num_attention_heads", "num_hidden_layers"},
    "gptj": {"max_position_embeddings", "num_attention_heads", "num_hidden_layers"},
}
# What makes other fields count.
_LONGROPE = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
_WINDOWS = {"use_sliding_window": True, "max_window_layers": 2, "layer_types": None, "sliding_window": 5}
GATES: dict[str, tuple[dict[str, Any], ...]] = {
    "falcon_h1": ({"mamba_rms_norm": True}, {"mamba_d_ssm": None, "mamba_d_head": "auto"}),
    "falcon": ({"new_decoder_architecture": False},),
    "lfm2": ({"intermediate_size": 99},),
    "phi3": ({"rope_scaling": _LONGROPE},),
    "phimoe": ({"rope_scaling": _LONGROPE},),
    "smollm3": (_WINDOWS, {"sliding_window": 5}),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), (_WINDOWS,)),
}


def outcome(fields: dict[str, Any]) -> object:
    """The Spec, or why there is none."""
    try:
        return dataclasses.asdict(spec_of(ModelConfig(fields)))
    except StartupError as error:
        return str(error)


@pytest.mark.long
@pytest.mark.parametrize("model_type", TYPES)
def test_each_field_that_modelling_reads_counts(model_type: str) -> None:
    plain = base_fields(model_type)
    bases = [plain, *({**plain, **gate} for gate in GATES.get(model_type, ()))]
    before = [outcome(base) for base in bases]
    assert all(isinstance(spec, dict) for spec in before), before
    known = BY_TENSORS | WITHOUT_EFFECT | OF_TYPE.get(model_type, set())
    tried: dict[str, bool] = {}
    for name, value in changes(model_type, plain):
        if name in read_by_modelling(model_type) - known:
            after = [outcome(with_change(base, name, value)) for base in bases]
            tried[name] = tried.get(name, False) or after != before
    assert [name for name, counts in tried.items() if not counts] == []


_ROTATIONS = ("rope_theta", "rope_parameters", "rope_scaling", "rope_local_base_freq", "rotary_emb_base")


@pytest.mark.parametrize("model_type", TYPES)
def test_the_base_of_rotations_that_the_file_does_not_say(model_type: str, tmp_path: Path) -> None:
    """Each type has its own, and a text model's may differ from that of the type that it is otherwise."""
    from transformers import AutoConfig

    base = base_fields(model_type)
    text = base.get("text_config")
    fields = base if text is None else text
    sections = {
        name: (fields.get("rope_parameters") or {}).get(name) for name in ("mrope_section", "mrope_interleaved")
    }
    silent = {name: value for name, value in fields.items() if name not in _ROTATIONS}
    silent["rope_parameters"] = {name: value for name, value in sections.items() if value is not None} or None
    fields = silent if text is None else {**base, "text_config": silent}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    made = AutoConfig.from_pretrained(tmp_path)
    blocks = getattr(made if text is None else made.text_config, "rope_parameters", None) or {}
    by_kind = [block["rope_theta"] for block in blocks.values() if isinstance(block, dict) and "rope_theta" in block]
    theirs = {blocks["rope_theta"]} if "rope_theta" in blocks else set(by_kind)
    ours = {one.theta for one in spec_of(ModelConfig(fields)).ropes if one is not None}
    assert ours <= theirs or not theirs
