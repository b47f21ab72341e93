"""Which part of a vision model's config and weights is its text model; `features.images` loads towers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.spec import Names
from model_server.models.families.base import BLANK_IDS

TEXT_TYPES: dict[str, str] = {
    "aya_vision": "cohere2",
    "blip-2": "opt",
    "cohere2_vision": "cohere2",
    "deepseek_vl": "llama",
    "deepseek_vl_hybrid": "llama",
    "fast_vlm": "qwen2",
    "fun_asr_nano": "qwen3",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm46v": "glm4v_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "glmga": "glm4v_text",
    "got_ocr2": "qwen2",
    "granite4_vision": "granite4_vision_text",
    "granite_docling": "granite_docling_text",
    "idefics2": "mistral",
    "idefics3": "llama",
    "instructblip": "opt",
    "instructblipvideo": "opt",
    "internvl": "qwen2",
    "janus": "llama",
    "kimi_k25": "deepseek_v3",
    "lighton_ocr": "qwen3",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "ovis2": "qwen2",
    "paligemma": "gemma",
    "perception_lm": "llama",
    "pp_chart2table": "qwen2",
    "qianfan_ocr": "qwen3",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "shieldgemma2": "gemma3_text",
    "smolvlm": "llama",
    "vibevoice_asr": "qwen2",
    "video_llama_3": "qwen2",
    "video_llava": "llama",
    "vipllava": "llama",
}
"""Model type -> the type of its text model where the config does not say it."""

# Text models that are another one's but for the positions of images.
_SAME_TEXT = {
    "glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe", "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe", "qwen2_5_omni_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe", "granite4_vision_text": "granite", "granite_docling_text": "granite",
}  # fmt: skip
# What transformers' modelling of a type does whatever its config says.
_ALWAYS: dict[str, dict[str, float | None]] = {
    "aya_vision": {"logit_scale": 1.0},
    "cohere2_vision": {"logit_scale": 1.0},
    "gemma3": {"final_logit_softcapping": None},
    "qwen3_omni_moe_thinker": {"use_sliding_window": False},
    "qwen3_vl": {"use_sliding_window": False},
    "qwen3_vl_moe": {"norm_topk_prob": True, "use_sliding_window": False},
    "shieldgemma2": {"final_logit_softcapping": None},
}
_EPS: dict[str, float] = {"qwen2_vl": 1e-5, "qwen2_5_vl": 1e-5}
"""Type -> its own default of `rms_norm_eps`, which the type of its text has another one of."""
_THETAS: dict[str, float] = {
    "qwen2_5_omni_thinker": 1e6, "qwen2_5_vl": 1e6, "qwen2_vl": 1e6, "qwen3_omni_moe_thinker": 1e6, "qwen3_vl": 5e5,
    "qwen3_vl_moe": 5e5,
}  # fmt: skip
"""Type -> its own base of the rotations where the config says none."""
# Fields of the text model that say what the whole type does anyway: tokens of its prompts see each other.
_IMPLIED: dict[str, tuple[str, ...]] = {"paligemma": ("use_bidirectional_attention",)}
# What the rotations of a type are where its config does not say it.
_GLM_ROPE: dict[str, object] = {"mrope_section": [8, 12, 12], "partial_rotary_factor": 1.0}
_QWEN35_ROPE: dict[str, object] = {"mrope_section": [11, 11, 10]}
_ROPES: dict[str, dict[str, object]] = {
    "glm46v": _GLM_ROPE,
    "glmga": _GLM_ROPE,
    "glm4v": _GLM_ROPE,
    "glm4v_moe": {"mrope_section": [8, 12, 12]},
    "qwen3_5": _QWEN35_ROPE,
    "qwen3_5_moe": _QWEN35_ROPE,
    "qwen3_vl": {"mrope_section": [24, 20, 20]},
    "qwen3_vl_moe": {"mrope_section": [24, 20, 20]},
}

_GEMMA4_TOKENS = {"image_token_id": 258880, "video_token_id": 258884, "audio_token_id": 258881}
_BLANKS: dict[str, dict[str, int]] = {"gemma4": _GEMMA4_TOKENS, "gemma4_unified": _GEMMA4_TOKENS}
"""Type -> the fields of its tokens that are embedded as padding is, and what silent files mean."""

_LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
_GEMMA4: dict[str, float] = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
    "vocab_size": 262144,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, float]] = {
    "llama": {**_LLAMA, "intermediate_size": 11008},
    "mistral": {**_LLAMA, "intermediate_size": 14336},
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "qwen3_vl_moe_text": {
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "max_position_embeddings": 128000,
    },
    "granite_docling_text": {
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.263,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "qwen2_5_omni_text": {"num_attention_heads": 28, "num_key_value_heads": 4},
    "qwen3_omni_moe_text": {"num_attention_heads": 28, "num_key_value_heads": 4, "norm_topk_prob": True},
    "glm4v_moe_text": {
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "vocab_size": 151424,
        "max_position_embeddings": 65536,
    },
    "glm4v_text": {
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "vocab_size": 151552,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
    },
}
"""Type of the text model -> field -> transformers' default: some public files leave sizes out of `text_config`."""

BASES = (
    "model.language_model.", "model.language_model.model.", "language_model.model.", "model.text_model.",
    "thinker.model.", "model.",
)  # fmt: skip
"""What the names of the text model's tensors have begun with, at one time or another."""

_TOWERS = (
    "acoustic_tokenizer_encoder", "aligner", "audio_tower", "connector", "embed_audio", "embed_vision",
    "generation_aligner", "generation_embeddings", "generation_head", "high_res_vision_alpha", "high_res_vision_model",
    "high_res_vision_neck", "high_res_vision_proj", "image_newline", "image_tower", "language_projection",
    "layerwise_projectors", "mlp1", "mm_projector", "multi_modal_projector", "projector", "qformer", "query_tokens",
    "semantic_tokenizer_encoder", "spatial_projectors", "video_tower", "vision_embedder", "vision_encoder",
    "vision_model", "vision_projection", "vision_tower", "visual", "visual_embeddings_table", "vqmodel",
)  # fmt: skip
# What holds the parts of a model.
_MODEL = "model."

_HEADS = ("language_model.lm_head", "thinker.lm_head")

# What holds those of a model that speaks too, beside what speaks.
_THINKER = "thinker."
_SPEAKING = ("code2wav", "talker", "token2wav")

OUTER_NAMES = (
    "embedding", "embedding_projection", "positions", "embedding_norm", "layer_inputs", "layer_inputs_projection",
    "layer_inputs_norm", "norm", "output_projection",
)  # fmt: skip
"""Fields of `Names`: modules before and behind the layers, but for the head."""


def text_config(config: ModelConfig) -> ModelConfig:
    """Return the text model's config; other models' as it is."""
    default = TEXT_TYPES.get(config.model_type)
    if default is None:
        return config
    block = config.get("text_config")
    eps = {"rms_norm_eps": _EPS[config.model_type]} if config.model_type in _EPS else {}
    if block is None:  # the first files of Qwen 2 VL have all of it on the top level
        missing = {} if config.has("rms_norm_eps") else eps
        missing |= _silent_theta(config, config.model_type)
        return _rope_kind(config.replaced(model_type=default, **missing), config.model_type)
    if not isinstance(block, Mapping):
        raise StartupError(f"config.json: `text_config` must be an object, got {block!r:.200}")
    text = ModelConfig({"model_type": default, **eps, **block}).without(*_IMPLIED.get(config.model_type, ()))
    defaults = DEFAULTS.get(text.model_type, {})
    own: dict[str, float | None] = {name: value for name, value in defaults.items() if not text.has(name)}
    own |= _silent_theta(text, config.model_type)
    own |= _ALWAYS.get(config.model_type, {})
    blank = _blanks(config, text)
    if text.model_type == "glm4v_text":  # it has no such field
        own["head_dim"] = text.count("hidden_size", 4096) // text.count("num_attention_heads", 32)
    text_type = _SAME_TEXT.get(text.model_type, text.model_type)
    return _rope_kind(text.replaced(model_type=text_type, **own, **blank), config.model_type)


def _blanks(config: ModelConfig, text: ModelConfig) -> dict[str, object]:
    """Name the tokens that are embedded as padding."""
    fields = _BLANKS.get(config.model_type, {})
    said = [config.get(name) if config.has(name) else default for name, default in fields.items()]
    size = text.count("vocab_size", 262144)
    return {BLANK_IDS: tuple(one for one in said if type(one) is int and 0 <= one < size)} if said else {}


def _silent_theta(text: ModelConfig, model_type: str) -> dict[str, float]:
    """Return the base of a type's rotations, if its config says none."""
    is_said = text.has("rope_theta") or text.rope_block().get("rope_theta") is not None
    return {} if is_said or model_type not in _THETAS else {"rope_theta": _THETAS[model_type]}


def is_of_tower(tensor: str) -> bool:
    """Whether a tensor belongs to the tower, the projector, or what speaks."""
    return tensor.removeprefix(_THINKER).removeprefix(_MODEL).split(".")[0] in (*_TOWERS, *_SPEAKING)


def text_names(names: Names, tensors: Iterable[str]) -> Names:
    """Spell the text model's `names` as the vision model's files do."""
    stored = frozenset(tensors)
    embedding = names.embedding.removeprefix(names.base) + ".weight"
    base = next((base for base in BASES if base + embedding in stored), None)
    if base is None:
        raise StartupError(f"weight {BASES[0]}{embedding} does not exist")

    def spelt(name: str) -> str:
        return base + name.removeprefix(names.base)

    outer: dict[str, Any] = {name: spelt(value) for name in OUTER_NAMES if (value := getattr(names, name)) is not None}
    inner_head = next((head for head in _HEADS if any(name.startswith(head + ".") for name in stored)), None)
    return dataclasses.replace(
        names,
        base=base,
        layers=spelt(names.layers),
        **outer,
        head=inner_head or names.head,
    )


def _rope_kind(text: ModelConfig, model_type: str) -> ModelConfig:
    """Add the sections of rotations that images need; text's three positions are equal."""
    for name in ("rope_parameters", "rope_scaling"):
        block = text.get(name)
        if not isinstance(block, Mapping):
            continue
        known = _ROPES.get(model_type, {})
        kept = {**known, **{name: text.get(name) for name in known if text.has(name)}, **block}
        if model_type in ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"):
            kept["mrope_interleaved"] = True
        for kind in ("rope_type", "type"):
            if kept.get(kind) == "mrope":
                kept[kind] = "default"
        text = text.replaced(**{name: kept})
    return text
