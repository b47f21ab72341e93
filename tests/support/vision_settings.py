"""Folders with the image settings of public vision models: a config and a processor, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_RGB = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _qwen(model_type: str, patch: int, lowest: int, highest: int) -> tuple[dict[str, Any], dict[str, Any]]:
    vision = {"patch_size": patch, "spatial_merge_size": 2}
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "merge_size": 2,
                 "temporal_patch_size": 2, "size": {"shortest_edge": lowest, "longest_edge": highest}}  # fmt: skip
    return {"model_type": model_type, "vision_config": vision}, processor


def _clip(model_type: str, processor: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    config = {"model_type": model_type, "text_config": {"model_type": "llama"},
              "vision_config": {"model_type": "clip_vision_model", "patch_size": 14, "image_size": 336}}  # fmt: skip
    return config, processor


def _tiles(model_type: str, name: str, vision: dict[str, int], scale: int, longest: int, tile: int) -> Any:
    config = {"model_type": model_type, "vision_config": vision, "scale_factor": scale}
    return config, {"image_processor_type": name, "do_image_splitting": True, "size": {"longest_edge": longest},
                    "max_image_size": {"longest_edge": tile}}  # fmt: skip


def _pixtral(model_type: str, longest: int, patch: int, merge: int) -> tuple[dict[str, Any], dict[str, Any]]:
    config = {"model_type": model_type, "spatial_merge_size": merge, "text_config": {"model_type": "mistral"},
              "vision_config": {"model_type": "pixtral", "patch_size": patch}}  # fmt: skip
    if model_type == "llava":
        del config["spatial_merge_size"]
    return config, {"image_processor_type": "PixtralImageProcessor", "patch_size": _square(patch),
                    "size": {"longest_edge": longest}}  # fmt: skip


def _glm(model_type: str, processor: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        {"model_type": model_type, "vision_config": {"patch_size": 14, "spatial_merge_size": 2}},
        {"image_processor_type": processor, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
         "size": {"shortest_edge": 12544, "longest_edge": 11760000}},
    )  # fmt: skip


_ONEVISION = [[384 * a, 384 * b] for a in range(1, 7) for b in range(1, 7)]

SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava": _clip("llava", {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336},
                             "crop_size": _square(336)}),
    "llava_next": _clip("llava_next", {
        "image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 336}, "crop_size": _square(336),
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]}),
    "llava_next_video": _clip("llava_next_video", {
        "image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 336}, "crop_size": _square(336),
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]}),
    "llava_onevision": (
        {"model_type": "llava_onevision", "text_config": {"model_type": "qwen2"}, "image_grid_pinpoints": _ONEVISION,
         "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 384}},
        {"image_processor_type": "LlavaOnevisionImageProcessor", "size": _square(384), **_RGB,
         "image_grid_pinpoints": _ONEVISION}),
    "vipllava": _clip("vipllava", {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336},
                                   "crop_size": _square(336)}),
    "deepseek_vl": ({"model_type": "deepseek_vl", "vision_config": {"model_type": "siglip_vision_model",
                                                                    "patch_size": 16, "image_size": 384}},
                    {"image_processor_type": "DeepseekVLImageProcessor", "size": _square(384), **_RGB}),
    "aya_vision": ({"model_type": "aya_vision", "downsample_factor": 2, "text_config": {"model_type": "cohere2"},
                    "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 364}},
                   {"image_processor_type": "GotOcr2ImageProcessor", "size": _square(364), "crop_to_patches": True,
                    "min_patches": 1, "max_patches": 12, **_RGB}),
    "idefics": ({"model_type": "idefics"}, {"image_processor_type": "IdeficsImageProcessor", "image_size": 224}),
    "mllama": ({"model_type": "mllama"},
               {"image_processor_type": "MllamaImageProcessor", "size": _square(560), "max_image_tiles": 4, **_RGB}),
    "idefics2": ({"model_type": "idefics2", "perceiver_config": {"resampler_n_latents": 64}},
                 {"image_processor_type": "Idefics2ImageProcessor", "do_image_splitting": True,
                  "size": {"longest_edge": 980, "shortest_edge": 378}}),
    "idefics3": _tiles("idefics3", "Idefics3ImageProcessor", {"image_size": 364, "patch_size": 14}, 2, 1456, 364),
    "smolvlm": _tiles("smolvlm", "SmolVLMImageProcessor", {"image_size": 512, "patch_size": 16}, 4, 2048, 512),
    "qwen2_vl": _qwen("qwen2_vl", 14, 3136, 12845056),
    "qwen2_5_vl": _qwen("qwen2_5_vl", 14, 3136, 12845056),
    "qwen2_5_omni_thinker": _qwen("qwen2_5_omni_thinker", 14, 3136, 12845056),
    "qwen3_omni_moe_thinker": _qwen("qwen3_omni_moe_thinker", 16, 65536, 16777216),
    "qwen3_5": _qwen("qwen3_5", 16, 65536, 16777216),
    "qwen3_5_moe": _qwen("qwen3_5_moe", 16, 65536, 16777216),
    "qwen3_vl": _qwen("qwen3_vl", 16, 65536, 16777216),
    "qwen3_vl_moe": _qwen("qwen3_vl_moe", 16, 65536, 16777216),
    "paligemma": ({"model_type": "paligemma", "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14,
                                                                "image_size": 224}},
                  {"image_processor_type": "SiglipImageProcessor", "size": _square(224), **_RGB}),
    "gemma3": ({"model_type": "gemma3", "mm_tokens_per_image": 256},
               {"image_processor_type": "Gemma3ImageProcessor", "size": _square(896), **_RGB}),
    "gemma4": ({"model_type": "gemma4", "vision_config": {}}, {"image_processor_type": "Gemma4ImageProcessor"}),
    "gemma4_unified": ({"model_type": "gemma4_unified", "vision_config": {}},
                       {"image_processor_type": "Gemma4UnifiedImageProcessor"}),
    "internvl": ({"model_type": "internvl", "image_seq_length": 256},
                 {"image_processor_type": "GotOcr2ImageProcessor", "size": _square(448), "crop_to_patches": True,
                  "min_patches": 1, "max_patches": 12}),
    "llama4": ({"model_type": "llama4", "vision_config": {"patch_size": 14, "pixel_shuffle_ratio": 0.5}},
               {"image_processor_type": "Llama4ImageProcessorFast", "max_patches": 16, "size": _square(336), **_RGB}),
    "pixtral": _pixtral("llava", 1024, 16, 1),
    "mistral3": _pixtral("mistral3", 1540, 14, 2),
    "glm4v": _glm("glm4v", "Glm4vImageProcessor"),
    "glm4v_moe": _glm("glm4v_moe", "Glm4vImageProcessor"),
    "glm46v": _glm("glm46v", "Glm46VImageProcessor"),
}  # fmt: skip


def settings_folder(folder: Path, name: str) -> Path:
    """The folder, with the settings of `name` written into it."""
    config, processor = SETTINGS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder
