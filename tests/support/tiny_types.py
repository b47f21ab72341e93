"""Tiny random checkpoints of any model type that transformers knows: common sizes under all the names in use.

Hidden 64, 4 layers, 4 heads, 2 KV heads, vocabulary 256, 4 experts, window 8. Names that a config class does not have
are left out; features that are off by default stay off.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

VOCAB_SIZE = 256
NUM_LAYERS = 4
WINDOW = 8

# Every spelling of the same few sizes.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "model_dim", "embed_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "attention_hidden_size", "intermediate_size_mlp", "dff"), 64),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), NUM_LAYERS
    ),
    "num_decoder_layers": NUM_LAYERS,
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"), 4),
    "encoder_attention_heads": 4,
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "swa_head_dim", "v_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "kv_lora_rank"), 16),
    "qk_rope_head_dim": 8,
    "vocab_size": VOCAB_SIZE,
    "unpadded_vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    "n_shared_experts": 1,
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "rotary_dim": 8,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "dropout": 0.0,
}

_MIXED = ["sliding_attention", "full_attention"] * 2

# What the common sizes do not fit.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 2.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {"layer_types": _MIXED, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_state": 16},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longt5": {"decoder_start_token_id": 0},
    "mt5": {"decoder_start_token_id": 0},
    "umt5": {"decoder_start_token_id": 0},
    "switch_transformers": {"decoder_start_token_id": 0},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"floor_scale": 4},
    "mamba2": {"num_heads": 8, "state_size": 16, "n_groups": 1, "head_dim": 16},
    "moshi": {"sliding_window": 512, "audio_vocab_size": 64},
    "plbart": {"decoder_start_token_id": 1},
    "phimoe": {"sliding_window": None},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "t5": {"decoder_start_token_id": 0},
}


def type_config(model_type: str, **overrides: Any) -> Any:
    """A tiny config of the text model behind `model_type`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    return config_class(**(_fields(config_class) | OVERRIDES.get(model_type, {}) | overrides))


def _fields(config_class: Any) -> dict[str, Any]:
    """The common sizes under the names that the class and its parts (text, vision, sound) know."""
    known = _field_names(config_class)
    fields = {name: value for name, value in SIZES.items() if name in known}
    if "qk_rope_head_dim" in known:  # latent attention: head_dim is that of the rotated part, and all heads have keys
        fields.pop("head_dim", None)
        fields["num_key_value_heads"] = 4
    for name, part in getattr(config_class, "sub_configs", {}).items():
        if hasattr(part, "model_type") and part.model_type:
            fields[name] = _fields(part) | OVERRIDES.get(part.model_type, {})
    return fields


def _field_names(config_class: Any) -> set[str]:
    names = set(inspect.signature(config_class.__init__).parameters)
    for base in config_class.__mro__:
        names |= set(getattr(base, "__annotations__", {}))
    return names | set(getattr(config_class, "attribute_map", {}))


def type_model(model_type: str, *, seed: int = 0, eager: bool = True, **overrides: Any) -> Any:
    """The model in float32 with random weights: matrices N(0, 0.15), vectors moved by N(0, 0.1)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = type_config(model_type, **overrides)
    auto_class = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class.from_config(config, **({"attn_implementation": "eager"} if eager else {}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:  # computed, not learned, and not saved
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * 0.15)
            else:
                parameter.add_(noise * 0.1)
    return model.eval()


def type_checkpoint(model_type: str, path: Path, **overrides: Any) -> Any:
    """Write such a model into the directory `path`, without a tokenizer, and return it."""
    model = type_model(model_type, **overrides)
    model.save_pretrained(path)
    return model
