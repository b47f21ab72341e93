"""How vision models differ: what towers read, how tokens see and count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

# Tokens count one after another, or the three positions of an image's token follow its place in the image.
Positions = Literal["plain", "sections"]
# Tokens of an image, or of a whole prompt, see each other both ways; None: only those before them.
Sight = Literal["image", "prompt"]


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """One kind of vision model."""

    # That the tower reads, by transformers' names; `optional` ones may be absent.
    features: tuple[str, ...]
    optional: tuple[str, ...] = ()
    positions: Positions = "plain"
    # Rows are added behind the first layers too.
    is_deep: bool = False
    # Prompts of a model where it is the prompt are computed whole.
    sight: Sight | None = None
    # Only layers with a window show tokens what is behind them.
    sight_in_windows: bool = False
    # Windows do not bound what tokens of an image see of it.
    sight_past_windows: bool = False
    # Of every prompt.
    first_position: int = 0
    # Cross attention reads the rows; image tokens stay.
    crosses: bool = False


_PIXELS = VisionFamily(("pixel_values",))
_SIZED = VisionFamily(("pixel_values", "image_sizes"))
_GRID = VisionFamily(("pixel_values", "image_grid_thw"), positions="sections")
_MASKED = VisionFamily(("pixel_values", "pixel_attention_mask"), optional=("pixel_attention_mask",))

_DEEP = replace(_GRID, is_deep=True)
_GEMMA4 = VisionFamily(("pixel_values", "image_position_ids"), sight="image", sight_in_windows=True)
_GEMMA4_UNIFIED = replace(_GEMMA4, sight_in_windows=False, sight_past_windows=True)
_PALIGEMMA = VisionFamily(("pixel_values",), sight="prompt", first_position=1)

FAMILIES: dict[str, VisionFamily] = {
    "aya_vision": _PIXELS,
    "deepseek_vl": _PIXELS,
    "gemma3": VisionFamily(("pixel_values",), sight="image"),
    "gemma4": _GEMMA4,
    "gemma4_unified": _GEMMA4_UNIFIED,
    "glm46v": _GRID,
    "glm4v": _GRID,
    "glm4v_moe": _GRID,
    "idefics": VisionFamily(("pixel_values",), crosses=True),
    "idefics2": _MASKED,
    "idefics3": _MASKED,
    "internvl": _PIXELS,
    "llama4": VisionFamily(("pixel_values",)),
    "llava": _PIXELS,
    "llava_next": _SIZED,
    "llava_next_video": _SIZED,
    "llava_onevision": _SIZED,
    "mistral3": _SIZED,
    "mllama": VisionFamily(("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"), crosses=True),
    "paligemma": _PALIGEMMA,
    "qwen2_5_omni_thinker": _GRID,
    "qwen2_5_vl": _GRID,
    "qwen2_vl": _GRID,
    "qwen3_5": _GRID,
    "qwen3_5_moe": _GRID,
    "qwen3_omni_moe_thinker": _DEEP,
    "qwen3_vl": _DEEP,
    "qwen3_vl_moe": _DEEP,
    "smolvlm": _MASKED,
    "vipllava": _PIXELS,
}
"""Model type -> family, of those whose images are served."""


def vision_family(fields: Mapping[str, Any]) -> VisionFamily | None:
    """Return config.json's family, if images are served."""
    family = FAMILIES.get(str(fields.get("model_type")))
    tower = fields.get("vision_config")
    if family in (_GEMMA4, _GEMMA4_UNIFIED):
        return _gemma4(family, fields) if isinstance(tower, Mapping) else None
    has_sizes = isinstance(tower, Mapping) and tower.get("model_type") == "pixtral"
    return _SIZED if family is _PIXELS and has_sizes else family


def _gemma4(family: VisionFamily, fields: Mapping[str, Any]) -> VisionFamily:
    """Return the row; small models see nothing ahead."""
    text = fields.get("text_config")
    silent = "vision" if family is _GEMMA4_UNIFIED else None
    sight = text.get("use_bidirectional_attention", silent) if isinstance(text, Mapping) else silent
    return family if sight == "vision" else replace(family, sight=None, sight_in_windows=False)
