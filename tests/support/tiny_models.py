"""Tiny random checkpoints that look like hub ones: config, safetensors, generation config, tokenizer, chat template.

Sizes: hidden 64, 4 layers, 4 heads, 2 KV heads, vocabulary 512, window 8. Weights are large enough that a forgotten
bias, norm or mask changes the argmax: matrices N(0, 0.15), vectors moved by N(0, 0.1). The same arguments always give
the same files. Importing this module costs nothing; writing a checkpoint imports transformers (seconds, once).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BOS, EOS, USER, ASSISTANT = "<s>", "</s>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [BOS, EOS, USER, ASSISTANT]
VOCAB_SIZE = 512
MAX_POSITIONS = 2048
WINDOW = 8

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.2, 1.4, 1.7, 2.0, 2.1, 2.5, 3.0],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}

_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

_SPARSE = _MLA | {
    "q_lora_rank": 24,
    "num_experts_per_tok": 3,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 8,
}

_GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW}

_DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}

_KIMI = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "linear_num_heads": 4,
    "linear_head_dim": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}

_MAMBA1 = {"mamba_d_state": 12}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 24}
_NEMOTRON = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    # Which transformers' steps bound by nothing, and its chunks by this.
    "time_step_min": 1e-30,
}

# (model type, variant) -> config fields that differ from the common sizes. "plain" needs no entry.
VARIANTS: dict[tuple[str, str], dict[str, Any]] = {
    ("llama", "biases_tied"): {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ("llama", "llama3"): {"rope_parameters": _LLAMA3},
    ("llama", "yarn"): {"rope_parameters": _YARN, "max_position_embeddings": 128},
    ("llama", "linear"): {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ("llama", "mha"): {"num_key_value_heads": 4},
    ("llama", "mqa"): {"num_key_value_heads": 1},
    ("llama", "odd_vocab"): {"vocab_size": 509},
    ("llama", "odd_vocab_tied"): {"vocab_size": 509, "tie_word_embeddings": True},
    ("llama", "head_dim"): {"head_dim": 32},
    ("mistral", "plain"): {"sliding_window": WINDOW},
    ("mistral", "no_window"): {"sliding_window": None},
    ("qwen2", "windows"): {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ("qwen3", "plain"): {"head_dim": 32},
    ("llama", "longrope"): {"rope_parameters": _LONGROPE, "max_position_embeddings": 128},
    ("phi3", "longrope"): {"rope_parameters": _LONGROPE, "max_position_embeddings": 128},
    ("phi3", "partial_window"): {"partial_rotary_factor": 0.5, "sliding_window": WINDOW, "tie_word_embeddings": True},
    ("granite", "plain"): {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.1,
        "logits_scaling": 4.0,
    },
    ("smollm3", "windows"): {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "no_rope_layers": [1, 0, 0, 1],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    ("gemma", "plain"): {"head_dim": 32, "tie_word_embeddings": True},
    ("gemma2", "plain"): {
        "head_dim": 32,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    ("gemma2", "no_caps"): {"head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ("gemma3_text", "plain"): {
        "head_dim": 32,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    },
    ("gemma4_text", "plain"): _GEMMA4
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "final_logit_softcapping": 5.0,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    ("gemma4_text", "experts"): _GEMMA4
    | {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
    },
    ("gemma4_unified_text", "plain"): _GEMMA4
    | {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 1,
    },
    ("cohere", "qk_norm"): {"use_qk_norm": True},
    ("cohere2", "plain"): {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    ("starcoder2", "plain"): {"sliding_window": WINDOW, "tie_word_embeddings": True},
    ("stablelm", "plain"): {"use_qkv_bias": True},
    ("stablelm", "parallel"): {"use_parallel_residual": True, "qk_layernorm": True},
    ("phi", "qk_norm"): {"qk_layernorm": True, "num_key_value_heads": 4},
    ("gpt2", "plain"): {"tie_word_embeddings": True},
    ("gpt2", "scales"): {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "n_inner": 96},
    ("gpt_bigcode", "plain"): {"tie_word_embeddings": True},
    ("gpt_bigcode", "mha"): {"multi_query": False, "n_inner": 96},
    ("gptj", "plain"): {"rotary_dim": 8},
    ("gpt_neox", "sequential"): {"use_parallel_residual": False, "rotary_pct": 0.5},
    ("bloom", "plain"): {"tie_word_embeddings": True},
    ("bloom", "six_heads"): {"hidden_size": 96, "n_head": 6},
    ("mpt", "plain"): {"attn_config": {"clip_qkv": 0.8}, "tie_word_embeddings": True},
    ("mpt", "six_heads"): {"d_model": 96, "n_heads": 6, "attn_config": {"softmax_scale": 0.1}},
    ("falcon", "plain"): {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ("falcon", "one_norm"): {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ("falcon", "mqa"): {"multi_query": True, "tie_word_embeddings": True},
    ("falcon", "alibi"): {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ("falcon", "alibi_six_heads"): {
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
        "hidden_size": 96,
        "num_attention_heads": 6,
    },
    ("opt", "plain"): {"ffn_dim": 96, "tie_word_embeddings": True},
    ("opt", "post_norm"): {
        "ffn_dim": 96,
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 32,
        "tie_word_embeddings": True,
    },
    ("opt", "galactica"): {
        "ffn_dim": 96,
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "activation_function": "gelu",
    },
    ("mixtral", "plain"): {"num_local_experts": 4},
    ("mixtral", "windows"): {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": WINDOW},
    ("granitemoe", "plain"): {
        "num_local_experts": 4,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.1,
        "logits_scaling": 4.0,
    },
    ("qwen2_moe", "plain"): {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
    },
    ("qwen2_moe", "windows"): {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 3,
    },
    ("qwen3_moe", "plain"): {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "head_dim": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    ("qwen3_moe", "window"): {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    },
    ("phimoe", "plain"): {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True},
    ("phimoe", "longrope"): {
        "num_local_experts": 6,
        # Many gates come close to the best one.
        "router_jitter_noise": 0.4,
        "rope_parameters": _LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.3},
        "max_position_embeddings": 128,
    },
    ("dbrx", "plain"): {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    ("dbrx", "unscaled"): {
        "attn_config": {"kv_n_heads": 4, "clip_qkv": 100.0, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": 48,
            "moe_num_experts": 6,
            "moe_top_k": 3,
            "moe_normalize_expert_weights": None,
            "ffn_act_fn": {"name": "gelu"},
        },
    },
    ("gpt_oss", "plain"): {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "sliding_window": WINDOW,
        "swiglu_limit": 1.0,
        "max_position_embeddings": 131072,
    },
    ("deepseek_v2", "plain"): _MLA
    | {
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
        "max_position_embeddings": 128,
    },
    ("deepseek_v2", "greedy"): _MLA | {"q_lora_rank": 24, "num_experts_per_tok": 2, "n_shared_experts": 1},
    ("deepseek_v3", "plain"): _MLA
    | {
        "q_lora_rank": 24,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
        "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "max_position_embeddings": 128,
    },
    ("deepseek_v3", "halves"): _MLA
    | {
        "q_lora_rank": None,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "rope_interleave": False,
    },
    ("glm4_moe", "plain"): {
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    ("glm4_moe", "dense_two"): {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 2,
        "norm_topk_prob": False,
        "head_dim": 32,
    },
    ("glm4_moe_lite", "plain"): {name: value for name, value in _MLA.items() if name != "first_k_dense_replace"}
    | {"q_lora_rank": 24, "num_experts_per_tok": 3, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
    ("deepseek_v32", "plain"): _SPARSE
    | {
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "max_position_embeddings": 128,
    },
    ("deepseek_v32", "biases"): _SPARSE
    | {
        "n_group": 1,
        "topk_group": 1,
        "attention_bias": True,
        "index_n_heads": 7,
        "index_head_dim": 24,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    },
    ("glm_moe_dsa", "plain"): _SPARSE,
    ("glm_moe_dsa", "shared"): _SPARSE | {"indexer_types": ["full", "shared", "full", "shared"]},
    ("hy_v3", "plain"): {
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
    },
    ("minimax_m2", "plain"): {
        "head_dim": 32,
        "rotary_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
    },
    ("ministral3", "plain"): {
        "head_dim": 32,
        "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 4},
        "max_position_embeddings": 128,
    },
    ("mistral4", "plain"): _MLA
    | {
        "q_lora_rank": 24,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.3,
        "rope_parameters": _YARN
        | {
            "llama_4_scaling_beta": 0.4,
            "original_max_position_embeddings": 4,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 128,
    },
    ("llama4_text", "plain"): {
        "num_local_experts": 4,
        "intermediate_size_mlp": 80,
        "head_dim": 32,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": WINDOW,
        "floor_scale": 4,
    },
    ("llama4_text", "top_two"): {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "attention_chunk_size": WINDOW,
        "rope_parameters": _LLAMA3,
    },
    ("lfm2", "plain"): {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_multiple_of": 16},
    ("lfm2", "wide"): {
        "layer_types": ["full_attention", "conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 6,
        "conv_bias": True,
        "tie_word_embeddings": True,
    },
    ("lfm2_moe", "plain"): {
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
    },
    ("lfm2_moe", "no_bias"): {
        "layer_types": ["full_attention", "conv"] * 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 0,
        "use_expert_bias": False,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
    },
    ("qwen3_next", "plain"): _DELTA | {"full_attention_interval": 2, "mlp_only_layers": [1], "num_experts": 6},
    ("qwen3_5_text", "plain"): _DELTA
    | {"layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"]},
    ("qwen3_5_moe_text", "plain"): _DELTA | {"full_attention_interval": 2, "num_experts": 6},
    ("olmo_hybrid", "plain"): {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
    },
    ("olmo_hybrid", "unrotated"): {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": None,
        "linear_allow_neg_eigval": False,
        "linear_conv_kernel_dim": 3,
    },
    ("kimi_linear", "plain"): _KIMI
    | {"layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"], "n_group": 4, "topk_group": 2},
    ("kimi_linear", "dense_two"): _KIMI
    | {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "q_lora_rank": 24,
        "norm_topk_prob": False,
        "attention_bias": True,
        "linear_conv_kernel_dim": 3,
    },
    ("granitemoehybrid", "plain"): _MAMBA2
    | {
        "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
        "num_local_experts": 4,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.1,
        "logits_scaling": 4.0,
    },
    ("granitemoehybrid", "dense"): _MAMBA2
    | {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "mamba_n_groups": 2,
        "time_step_limit": (0.3, 0.9),
    },
    ("minimax", "plain"): {
        "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
        "num_local_experts": 4,
        "full_attn_alpha_factor": 1.5,
        "full_attn_beta_factor": 0.7,
        "linear_attn_alpha_factor": 1.25,
        "mlp_alpha_factor": 0.8,
        "mlp_beta_factor": 1.3,
    },
    ("minimax", "default"): {"num_hidden_layers": 3, "block_size": 4, "num_local_experts": 4, "sliding_window": 6},
    ("jamba", "plain"): _MAMBA1
    | {
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    ("jamba", "dense"): _MAMBA1
    | {
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "num_experts": 1,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "mamba_dt_rank": 6,
        "mamba_d_conv": 3,
        "tie_word_embeddings": True,
    },
    ("mamba", "plain"): {"state_size": 12, "time_step_rank": 6},
    ("mamba", "biases"): {"state_size": 16, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3},
    ("falcon_mamba", "plain"): {"state_size": 12, "tie_word_embeddings": False},
    ("mamba2", "plain"): {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "time_step_min": 1e-30},
    ("bamba", "plain"): _MAMBA2 | {"attn_layer_indices": [1, 3], "mamba_n_groups": 4},
    ("falcon_h1", "plain"): _MAMBA2
    | {
        "mamba_d_ssm": 64,
        "embedding_multiplier": 5.0,
        "lm_head_multiplier": 0.3,
        "mlp_multipliers": [0.5, 0.7],
        "key_multiplier": 0.4,
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 0.6,
        "ssm_in_multiplier": 1.3,
        "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 0.5],
        "ssm_out_multiplier": 0.7,
    },
    ("falcon_h1", "norms"): _MAMBA2 | {"mamba_d_ssm": 64, "mamba_n_groups": 2, "mamba_rms_norm": True},
    ("falcon_h1", "gates_first"): _MAMBA2
    | {"mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ("nemotron_h", "plain"): _NEMOTRON
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "routed_scaling_factor": 1.5,
    },
    ("nemotron_h", "latent"): _NEMOTRON
    | {
        "layers_block_type": ["linear_attention", "full_attention", "moe"],
        "moe_latent_size": 32,
        "n_group": 2,
        "norm_topk_prob": False,
    },
    ("olmo2", "mha"): {"num_key_value_heads": 4},
    ("qwen3", "windows"): {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
}

_TEXT = """The quick brown fox jumps over the lazy dog. A tercet is a stanza of three lines, and the three lines rhyme.
One process starts the others, one decides who runs next, one multiplies the matrices and answers with a token.
What is the capital of France? The capital of France is Paris. How are you today? I am well, thank you. Hello world!
In the beginning there was a prompt, and the prompt was long; the cache kept its keys and its values in small blocks.
Numbers: 0 1 2 3 4 5 6 7 8 9 10 42 100 1000. Names: Ada, Grace, Alan, Edsger. {"name": "value", "list": [1, 2, 3]}
def main() -> None: return None. Überraschung, naïve café, 日本語, emoji 🙂 and the rest of the bytes come one by one.
"""


def tiny_checkpoint(
    model_type: str,
    path: Path,
    *,
    variant: str = "plain",
    seed: int = 0,
    with_tokenizer: bool = True,
    vocab_size: int = VOCAB_SIZE,
    sharded: bool = False,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of `model_type` into the directory `path` and return it.

    `variant` names an entry of VARIANTS; `sharded` writes several weight files and an index; `overrides` are config
    fields. The tokenizer has at most `vocab_size` entries, all ids below the model's vocabulary size.
    """
    path.mkdir(parents=True, exist_ok=True)
    model = random_model(model_type, variant=variant, seed=seed, vocab_size=vocab_size, **overrides)
    model.save_pretrained(path, max_shard_size="200KB" if sharded else "5GB")
    if with_tokenizer:
        write_tokenizer(path, vocab_size=min(vocab_size, model.config.vocab_size))
    return path


def random_model(
    model_type: str, *, variant: str = "plain", seed: int = 0, vocab_size: int = VOCAB_SIZE, **overrides: Any
) -> Any:
    """The transformers model behind `tiny_checkpoint`, in float32 and evaluation mode, eager attention.

    Falcon with ALiBi: sdpa, because transformers' eager path adds the bias twice.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = tiny_config(model_type, variant=variant, vocab_size=vocab_size, **overrides)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attention = "sdpa" if model_type == "falcon" and config.alibi else "eager"
        is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        auto_class: Any = AutoModelForCausalLM if is_causal else AutoModelForImageTextToText
        model = auto_class.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():  # a tied tensor comes once
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * 0.15)
            else:
                parameter.add_(noise * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model.eval()


def tiny_config(model_type: str, *, variant: str = "plain", vocab_size: int = VOCAB_SIZE, **overrides: Any) -> Any:
    """A transformers config of the common tiny sizes, changed by the variant and then by `overrides`.

    Of the common fields those are set that the config class knows, under its own names.
    """
    from transformers import AutoConfig

    if variant != "plain" and (model_type, variant) not in VARIANTS:
        raise KeyError(f"no variant {variant!r} of {model_type}")
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    default = AutoConfig.for_model(model_type)
    spelled = {default.attribute_map.get(name, name): value for name, value in fields.items()}
    known = {name: value for name, value in spelled.items() if name in default.to_dict()}
    chosen = VARIANTS.get((model_type, variant), {})
    if model_type == "gpt_oss" and not hasattr(default, "swiglu_limit"):
        chosen = chosen | {"swiglu_limit": 7.0}  # what transformers before 5.19 computes with, whatever the file says
    return AutoConfig.for_model(model_type, **known | chosen | overrides)


def write_tokenizer(path: Path, *, vocab_size: int = VOCAB_SIZE) -> None:
    """Train a byte-level BPE on a small text and write tokenizer.json and tokenizer_config.json into `path`.

    Any text encodes (all 256 bytes are in the vocabulary); `<s>` (0) is put in front of every prompt, `</s>` is 1.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "additional_special_tokens": [USER, ASSISTANT],
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
