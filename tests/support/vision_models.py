"""Tiny random vision models as published ones look: config, weights, tokenizer, image processor.

The weights are large enough that another picture gives another answer: matrices normal with 1.5 / sqrt(fan-in),
embeddings 0.2 (0.02 where the head is tied to them), norms moved by 0.1. The same arguments always give the same files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wire.images.families import FAMILIES

TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "vocab_size": 512,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 14,
    "image_size": 56,
}  # fmt: skip
QWEN_TOWER: dict[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2}
MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
PINPOINTS = [[56 * a, 56 * b] for a, b in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]

IMAGE, START, END = 300, 301, 302
"""Ids of the image token, and of two that stand around an image or within it."""

_GLM: tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]] = (
    "glm4v_text", {"rope_parameters": MROPE | {"mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}},
    QWEN_TOWER | {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "image_size": 56}, {},
)  # fmt: skip
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4, "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "rope_parameters": MROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
}  # fmt: skip
_QWEN35_TOWER = QWEN_TOWER | {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "patch_size": 16,
    "num_position_embeddings": 64,
}  # fmt: skip
_SOUND = {
    "num_mel_bins": 16, "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "n_window": 4, "max_source_positions": 64,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 7,
    "sliding_window": 8,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 512,
    "layer_types": [*["sliding_attention", "sliding_attention", "full_attention"] * 2, "full_attention"],
}
_GEMMA4_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 256,
}
# Type -> the type of its text model, fields of it, of the tower, and of the whole.
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": (
        "llama", {}, TOWER | {"model_type": "clip_vision_model", "num_hidden_layers": 3}, {"image_seq_length": 16},
    ),
    "llava_next": (
        "mistral", {"sliding_window": None},
        TOWER | {"model_type": "clip_vision_model", "num_hidden_layers": 3},
        {"image_seq_length": 16, "image_grid_pinpoints": PINPOINTS},
    ),
    "pixtral": (
        "mistral", {"sliding_window": None},
        TOWER | {"model_type": "pixtral", "image_size": 112, "head_dim": 8},
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "mistral3": (
        "mistral", {"sliding_window": None},
        TOWER | {"model_type": "pixtral", "image_size": 112, "head_dim": 8},
        {"vision_feature_layer": -1, "spatial_merge_size": 2, "tie_word_embeddings": False},
    ),
    "idefics2": (
        "mistral", {"sliding_window": None}, TOWER | {"image_size": 98},
        {"perceiver_config": {
            "hidden_size": 64, "resampler_n_latents": 8, "resampler_depth": 2, "resampler_n_heads": 4,
            "resampler_head_dim": 16, "num_key_value_heads": 2,
        }},
    ),
    "idefics3": ("llama", {}, TOWER, {"scale_factor": 2}),
    "smolvlm": ("llama", {}, TOWER, {"scale_factor": 2}),
    "internvl": (
        "qwen2", {}, TOWER | {"image_size": [56, 56], "patch_size": [14, 14]},
        {"image_seq_length": 4, "tie_word_embeddings": False},
    ),
    "qwen2_vl": (
        "qwen2_vl_text", {"rope_parameters": MROPE}, QWEN_TOWER | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        {},
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl_text", {"rope_parameters": MROPE},
        QWEN_TOWER | {
            "depth": 3, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        {},
    ),
    "qwen3_vl": (
        "qwen3_vl_text",
        {"num_hidden_layers": 4, "rope_parameters": MROPE | {"mrope_interleaved": True}},
        QWEN_TOWER | {
            "depth": 4, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "patch_size": 16,
            "deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 64,
        },
        {},
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe_text",
        {
            "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "mlp_only_layers": [1], "rope_parameters": MROPE | {"mrope_interleaved": True},
        },
        QWEN_TOWER | {
            "depth": 4, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "patch_size": 16,
            "deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 64,
        },
        {},
    ),
    "qwen3_5": ("qwen3_5_text", _DELTA, _QWEN35_TOWER, {}),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        _DELTA | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
        },
        _QWEN35_TOWER,
        {},
    ),
    "llava_next_video": (
        "llama", {}, TOWER | {"model_type": "clip_vision_model", "num_hidden_layers": 3},
        {"image_seq_length": 16, "image_grid_pinpoints": PINPOINTS},
    ),
    "llava_onevision": (
        "qwen2", {}, TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"image_grid_pinpoints": PINPOINTS, "vision_aspect_ratio": "anyres_max_1"},
    ),
    "vipllava": (
        "llama", {}, TOWER | {"model_type": "clip_vision_model", "num_hidden_layers": 3},
        {"vision_feature_layers": [-1, -2, 1]},
    ),
    "deepseek_vl": ("llama", {}, TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}, {}),
    "aya_vision": (
        "cohere2", {"sliding_window": 8, "num_hidden_layers": 4},
        TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}, {"alignment_intermediate_size": 64},
    ),
    "glm4v": _GLM,
    "glm46v": _GLM,
    "glm4v_moe": (
        "glm4v_moe_text",
        _GLM[1] | {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        _GLM[2], {},
    ),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 7, "sliding_window": 3, "query_pre_attn_scalar": 16},
        TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"mm_tokens_per_image": 4, "boi_token_index": START, "eoi_token_index": END},
    ),
    "qwen2_5_omni_thinker": (
        "qwen2_5_omni_text", {"rope_parameters": MROPE},
        QWEN_TOWER | {
            "depth": 3, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        {"vision_start_token_id": START, "audio_config": _SOUND | {"output_dim": 64}},
    ),
    "qwen3_omni_moe_thinker": (
        "qwen3_omni_moe_text",
        {
            "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "mlp_only_layers": [1], "rope_parameters": MROPE | {"mrope_interleaved": True},
        },
        QWEN_TOWER | {
            "depth": 4, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "patch_size": 16,
            "deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 64,
        },
        {
            "vision_start_token_id": START,
            "audio_config": _SOUND | {"output_dim": 64, "downsample_hidden_size": 16, "n_window_infer": 8},
        },
    ),
    "gemma4": (
        "gemma4_text", _GEMMA4 | {"use_bidirectional_attention": "vision"}, _GEMMA4_TOWER | {"standardize": True}, {},
    ),
    # As small ones are: tokens of images are seen from behind only, and the last layers read the keys of others.
    "gemma4_small": (
        "gemma4_text", _GEMMA4 | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True}, _GEMMA4_TOWER, {},
    ),
    "gemma4_unified": (
        "gemma4_unified_text", {n: v for n, v in _GEMMA4.items() if "per_layer_input" not in n},
        {"patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 128},
        {},
    ),
    "paligemma": (
        "gemma", {}, TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"projection_dim": 64, "hidden_size": 64},
    ),
    "paligemma2": (
        "gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 16},
        TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"projection_dim": 64, "hidden_size": 64},
    ),
    "llama4": (
        "llama4_text",
        {
            "num_hidden_layers": 4, "num_local_experts": 4, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
        },
        TOWER | {
            "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "pixel_shuffle_ratio": 0.5,
            "intermediate_size": 128,
        },
        {"boi_token_index": START, "eoi_token_index": END},
    ),
}  # fmt: skip

# Type -> the class of its image processor (as the files name it) and its settings.
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("CLIPImageProcessor", {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}),
    "llava_next": (
        "LlavaNextImageProcessor",
        {
            "size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, "image_grid_pinpoints": PINPOINTS,
        },
    ),
    "pixtral": ("PixtralImageProcessor", {"size": {"longest_edge": 112}, "patch_size": 14}),
    "mistral3": ("PixtralImageProcessor", {"size": {"longest_edge": 112}, "patch_size": 28}),
    "idefics2": (
        "Idefics2ImageProcessor", {"size": {"longest_edge": 98, "shortest_edge": 56}, "do_image_splitting": False},
    ),
    "idefics3": (
        "Idefics3ImageProcessor", {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}},
    ),
    "smolvlm": ("SmolVLMImageProcessor", {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}}),
    "internvl": (
        "GotOcr2ImageProcessor",
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
    ),
    "qwen2_vl": (
        "Qwen2VLImageProcessor", {"size": {"shortest_edge": 3136, "longest_edge": 28 * 28 * 64}, "patch_size": 14},
    ),
    "qwen3_vl": (
        "Qwen2VLImageProcessor", {"size": {"shortest_edge": 4096, "longest_edge": 32 * 32 * 64}, "patch_size": 16},
    ),
    "glm4v": (
        "Glm4vImageProcessor", {"size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 28 * 28 * 64}},
    ),
    "llava_onevision": (
        "LlavaOnevisionImageProcessor",
        {"size": {"height": 56, "width": 56}, "image_grid_pinpoints": PINPOINTS},
    ),
    "deepseek_vl": ("DeepseekVLImageProcessor", {"size": {"height": 56, "width": 56}}),
    "llama4": ("Llama4ImageProcessorFast", {"size": {"height": 56, "width": 56}, "max_patches": 4}),
    "gemma3": ("Gemma3ImageProcessor", {"size": {"height": 56, "width": 56}}),
    "gemma4": ("Gemma4ImageProcessor", {"patch_size": 4, "max_soft_tokens": 70}),
    "gemma4_unified": ("Gemma4UnifiedImageProcessor", {"max_soft_tokens": 70}),
    "paligemma": ("SiglipImageProcessor", {"size": {"height": 56, "width": 56}}),
}  # fmt: skip
PROCESSORS["qwen2_5_vl"] = PROCESSORS["qwen2_vl"]
PROCESSORS["qwen3_vl_moe"] = PROCESSORS["qwen3_vl"]
PROCESSORS["qwen3_5"] = PROCESSORS["qwen3_5_moe"] = PROCESSORS["qwen3_vl"]
PROCESSORS["llava_next_video"] = PROCESSORS["llava_next"]
PROCESSORS["vipllava"] = PROCESSORS["llava"]
PROCESSORS["aya_vision"] = PROCESSORS["internvl"]
PROCESSORS["glm46v"] = ("Glm46VImageProcessor", PROCESSORS["glm4v"][1])
PROCESSORS["gemma4_small"] = PROCESSORS["gemma4"]
PROCESSORS["qwen2_5_omni_thinker"] = PROCESSORS["qwen2_vl"]
PROCESSORS["qwen3_omni_moe_thinker"] = PROCESSORS["qwen3_vl"]
PROCESSORS["glm4v_moe"] = PROCESSORS["glm4v"]
PROCESSORS["paligemma2"] = PROCESSORS["paligemma"]

# Processors of these classes take their classes' names from the model's type.
MODEL_TYPES = {"pixtral": "llava", "paligemma2": "paligemma", "gemma4_small": "gemma4"}


def vision_model(name: str) -> Any:
    """transformers' model in float32 and evaluation mode."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    text_type, text, tower, whole = CONFIGS[name]
    model_type = MODEL_TYPES.get(name, name)
    tied = AutoConfig.for_model(model_type).tie_word_embeddings and whole.get("tie_word_embeddings", True)
    image_field = next(
        n for n in ("image_token_id", "image_token_index") if hasattr(AutoConfig.for_model(model_type), n)
    )
    config = AutoConfig.for_model(
        model_type,
        text_config={"model_type": text_type, **TEXT, "tie_word_embeddings": tied, **text},
        vision_config=tower,
        **whole | {image_field: IMAGE, "tie_word_embeddings": tied},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    mend_llama4()
    randomise(model, tied=tied)
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 2
    return model


def mend_llama4() -> None:
    """Lets transformers 5.24 compute a whole llama4, which asks the output of its text model for a field it lacks."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    MoeCausalLMOutputWithPast.image_outputs = None


def randomise(model: Any, *, tied: bool) -> None:
    """Weights of the sizes that the first lines of this file name. tied: the head is the embedding."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "gate" in name.rsplit(".", 1)[-1] or "alpha" in name:  # of cross attention: zero in a new model
                parameter.fill_(0.7)
            elif "embed_tokens" in name:
                parameter.copy_(noise * (0.02 if tied else 0.2))
            elif "norm" in name or "layrnorm" in name:
                parameter.add_(noise * 0.1)
            elif parameter.dim() >= 2 and "embedding" not in name:
                parameter.copy_(noise * 1.5 / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(noise * 0.02)


def write_vision_checkpoint(folder: Path, name: str) -> Any:
    """Write the model, its tokenizer and its image processor's settings into `folder`; returns transformers' model."""
    model = vision_model(name)
    model.save_pretrained(folder)
    write_vision_tokenizer(folder, name)
    kind, settings = PROCESSORS[name]
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind, **settings}))
    return model


def write_vision_tokenizer(folder: Path, name: str) -> None:
    """A byte-level BPE of 300 tokens, and behind them the family's image token (300), and two more."""
    from support.tiny_models import write_tokenizer
    from tokenizers import AddedToken, Tokenizer

    write_tokenizer(folder, vocab_size=IMAGE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    marks = [
        FAMILIES[name if name in FAMILIES else MODEL_TYPES[name]].image_token,
        "<image_start>",
        "<image_end>",
    ]
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    assert tokenizer.token_to_id(marks[0]) == IMAGE
    tokenizer.save(str(folder / "tokenizer.json"))
