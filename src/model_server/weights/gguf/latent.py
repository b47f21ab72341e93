"""The architectures of GGUF files with latent attention: Kimi Linear, GLM 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_server.weights.gguf.architecture import NUMBERED, Architecture, experts, mlp, shared_expert
from model_server.weights.gguf.hybrids import attending, attention

# What makes keys and values of latents: two matrices, as they are absorbed, or in old files one.
_MODULES = {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj", "attn_kv_b": "self_attn.kv_b_proj",
}  # fmt: skip
_FIELDS = {"kv_lora_rank": "attention.kv_lora_rank", "v_head_dim": "attention.value_length_mla"}


def _latent(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    whole, rotated = given["attention.key_length_mla"], given["rope.dimension_count"]
    if type(whole) is not int or type(rotated) is not int or not 0 < rotated < whole:
        raise ValueError(
            f"`{given['general.architecture']}.attention.key_length_mla` is {whole!r:.80}; a whole number above "
            f"`rope.dimension_count` ({rotated!r:.80}) is expected"
        )
    return {
        "num_key_value_heads": fields["num_attention_heads"],
        # Of the part that all heads share.
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": whole - rotated,
    }


def _kimi(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {True: "full_attention", False: "linear_attention"}
    layers = [kinds[one] for one in attending(given, fields["num_hidden_layers"])]
    return {**_latent(given, fields), "layer_types": layers, "linear_num_heads": fields["num_attention_heads"]}


def _sparse(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    found, types = _latent(given, fields), given.get("attention.indexer.types")
    found["norm_topk_prob"] = bool(given.get("expert_weights_norm"))  # converters write no other value than true
    if isinstance(types, list):
        found["indexer_types"] = ["full" if one else "shared" for one in types[: fields["num_hidden_layers"]]]
    return found


LATENT = {
    "kimi-linear": Architecture(
        model_type="kimi_linear",
        layer={
            **attention(), **_MODULES, **mlp("mlp"), "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm", **shared_expert("block_sparse_moe.shared_experts"),
            **{f"ssm_conv1d_{one}": f"self_attn.{one}_conv1d" for one in "qkv"},
            **{f"ssm_{one}_{part}": f"self_attn.{one}_{part}_proj" for one in "fg" for part in "ab"},
            "ssm_beta": "self_attn.b_proj", "ssm_norm": "self_attn.o_norm", "ffn_gate_inp": "block_sparse_moe.gate",
        },
        tensors={
            "ssm_a": "self_attn.A_log",
            "ssm_dt.bias": "self_attn.dt_bias",
            "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
        },
        experts=experts("block_sparse_moe.experts", NUMBERED),
        fields={
            "num_experts": "expert_count",
            "num_experts_per_token": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "num_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
            "routed_scaling_factor": "expert_weights_scale",
            **_FIELDS,
            "linear_head_dim": "kda.head_dim",
            "linear_conv_kernel_dim": "ssm.conv_kernel",
        },
        optional={
            "q_lora_rank": "attention.q_lora_rank",
            "num_expert_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        derived=_kimi,
        fixed={"moe_renormalize": True, "mla_use_nope": True},
        expected={"expert_gating_func": (2,), "expert_weights_norm": (True,)},
    ),
    "glm-dsa": Architecture(
        model_type="glm_moe_dsa",
        layer={
            **_MODULES, **mlp("mlp"), "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate", **shared_expert("mlp.shared_experts"),
            "indexer.k_norm": "self_attn.indexer.k_norm", "indexer.proj": "self_attn.indexer.weights_proj",
            "indexer.attn_k": "self_attn.indexer.wk", "indexer.attn_q_b": "self_attn.indexer.wq_b",
        },
        tensors={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        experts=experts("mlp.experts"),
        fields={
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
            "routed_scaling_factor": "expert_weights_scale",
            "q_lora_rank": "attention.q_lora_rank",
            **_FIELDS,
            "index_n_heads": "attention.indexer.head_count",
            "index_head_dim": "attention.indexer.key_length",
            "index_topk": "attention.indexer.top_k",
        },
        optional={"n_group": "expert_group_count", "topk_group": "expert_group_used_count"},
        derived=_sparse,
        expected={"expert_gating_func": (2,)},
    ),
}  # fmt: skip
