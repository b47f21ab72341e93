"""Tiny random checkpoints of any model type that transformers knows: common sizes under all the names in use.

Hidden 64, 4 layers, 4 heads, 2 KV heads, vocabulary 256, 4 experts, window 8. Names that a config class does not have
are left out; features that are off by default stay off.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from support.tiny_overrides import LEFT_OUT, NUM_LAYERS, OVERRIDES, WINDOW

VOCAB_SIZE = 256

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

# Of what reads pictures or sound, under every spelling.
TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "model_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "mlp_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    "head_dim": 16,
    **dict.fromkeys(("image_size", "img_size"), 28),
    "patch_size": 14,
    **dict.fromkeys(("out_hidden_size", "text_hidden_size", "output_dim", "vision_output_dim", "lm_hidden_size"), 64),
    **dict.fromkeys(("projection_dim", "projector_input_dim", "projector_output_dim"), 64),
    "num_position_embeddings": 16,
    "vocab_size": 64,
}

# Parts that are of the common sizes, not towers.
_TEXTS = ("text_config", "decoder", "encoder", "text_encoder", "attn_config", "ffn_config")


def type_config(model_type: str, **overrides: Any) -> Any:
    """A tiny config of the text model behind `model_type`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    return config_class(**_merged(_merged(_fields(config_class), OVERRIDES.get(model_type, {})), overrides))


def _merged(fields: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """`fields` with others over them, also within objects; what is None is left out."""
    merged = dict(fields)
    for name, value in others.items():
        within = fields.get(name)
        merged[name] = _merged(within, value) if isinstance(within, dict) and isinstance(value, dict) else value
    return {name: value for name, value in merged.items() if value is not LEFT_OUT}


def _fields(config_class: Any, sizes: dict[str, Any] = SIZES) -> dict[str, Any]:
    """The common sizes under the names that the class and its parts (text, vision, sound) know."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = _field_names(config_class)
    fields = {name: value for name, value in sizes.items() if name in known}
    if "qk_rope_head_dim" in known:  # latent attention: head_dim is that of the rotated part, and all heads have keys
        fields.pop("head_dim", None)
        fields["num_key_value_heads"] = 4
    for name, part in getattr(config_class, "sub_configs", {}).items():
        sizes_of_part = sizes if name in _TEXTS else TOWER
        if hasattr(part, "model_type") and part.model_type:
            fields[name] = _merged(_fields(part, sizes_of_part), OVERRIDES.get(part.model_type, {}))
        elif default := _default_type(config_class, name):
            found = _merged(_fields(CONFIG_MAPPING[default], sizes_of_part), OVERRIDES.get(default, {}))
            fields[name] = {"model_type": default, **found}
    return fields


def _default_type(config_class: Any, part: str) -> str | None:
    """The type of a part that may have several."""
    default = getattr(config_class, "sub_configs_defaults", {}).get(part)
    return getattr(default, "model_type", None)


def _field_names(config_class: Any) -> set[str]:
    names = set(inspect.signature(config_class.__init__).parameters)
    for base in config_class.__mro__:
        names |= set(getattr(base, "__annotations__", {}))
    return names | set(getattr(config_class, "attribute_map", {}))


def type_model(model_type: str, *, seed: int = 0, eager: bool = True, **overrides: Any) -> Any:
    """The model in float32 with random weights: matrices N(0, 0.15), vectors moved by N(0, 0.1)."""
    import torch

    config = type_config(model_type, **overrides)
    auto_class = auto_class_of(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        make = getattr(auto_class, "from_config", None) or auto_class._from_config
        model = make(config, **({"attn_implementation": "eager"} if eager else {}))
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


def auto_class_of(config: Any) -> Any:
    """The whole model of a type, not its text model alone."""
    import transformers
    from transformers.models.auto import modeling_auto

    pairs = (
        (modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.AutoModelForImageTextToText),
        (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, transformers.AutoModelForSeq2SeqLM),
        (modeling_auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING, transformers.AutoModelForTextToWaveform),
        (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
        (modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING, transformers.AutoModelForMultimodalLM),
    )
    found = next((one for mapping, one in pairs if type(config) in mapping), None)
    if found is None:  # a mapping does not find the class of a config that has two types
        return getattr(transformers, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config.model_type])
    return found


# What files of these types have, where transformers writes names that it alone reads, or does not read itself.
_PUBLISHED = {
    "kimi_k25": ("language_model.model.blocks.", "language_model.model.layers."),
    "qianfan_ocr": ("language_model.model.encoder.layers.", "language_model.model.layers."),
}


def type_checkpoint(model_type: str, path: Path, **overrides: Any) -> Any:
    """Write such a model into the directory `path`, without a tokenizer, and return it."""
    model = type_model(model_type, **overrides)
    model.save_pretrained(path)
    name_as_published(model_type, path)
    return model


def name_as_published(model_type: str, path: Path) -> None:
    """Give the tensors of a file by transformers the names that the hub's files have."""
    from safetensors.torch import load_file, save_file

    if model_type in _PUBLISHED:
        file = path / "model.safetensors"
        save_file({name.replace(*_PUBLISHED[model_type]): one for name, one in load_file(file).items()}, file)
