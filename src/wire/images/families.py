"""The models that read images, a row each, and what stands for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from wire.images import expansions
from wire.images.expansions import Layout

Positions = Literal["plain", "mrope"]


@dataclass(frozen=True, kw_only=True)
class ImageFamily:
    """What prompts have in place of an image."""

    # Whose embeddings the tower's rows replace.
    image_token: str
    # An image in a chat template's prompt.
    placeholder: str
    # Replaces a native prompt's `![](url)`; holds one placeholder.
    marker: str
    # Text of one image, by token and layout.
    expand: Callable[[str, Layout], str] = expansions.plain
    # The whole prompt, of the expanded text and BOS.
    arrange: Callable[[str, str], str] = expansions.as_it_is
    # False where `arrange` writes them.
    adds_special_tokens: bool = True
    # Tokens see each other both ways, so no chunk ends within.
    is_indivisible: bool = False
    # "mrope": rotary positions follow the grid.
    positions: Positions = "plain"

    def expansion(self, layout: Layout) -> str:
        """The text that replaces the placeholder of an image."""
        return self.expand(self.image_token, layout)


def _same(token: str, **others: Any) -> ImageFamily:
    """Image token, placeholder and marker are one text."""
    return ImageFamily(image_token=token, placeholder=token, marker=token, **others)


_QWEN = ImageFamily(
    image_token="<|image_pad|>",
    placeholder="<|image_pad|>",
    marker="<|vision_start|><|image_pad|><|vision_end|>",
    positions="mrope",
)
_QWEN_OMNI = ImageFamily(
    image_token="<|IMAGE|>",
    placeholder="<|IMAGE|>",
    marker="<|vision_bos|><|IMAGE|><|vision_eos|>",
    positions="mrope",
)
_GLM = ImageFamily(
    image_token="<|image|>",
    placeholder="<|image|>",
    marker="<|begin_of_image|><|image|><|end_of_image|>",
    positions="mrope",
)
_GEMMA4 = _same("<|image|>", expand=expansions.gemma4, is_indivisible=True)
_PIXTRAL = _same("[IMG]", expand=expansions.lines_of_tokens)
_NUMBERED_TILES = _same("<image>", expand=expansions.numbered_tiles)

FAMILIES: Mapping[str, ImageFamily] = {
    "llava": _same("<image>"),
    "llava_next": _same("<image>"),
    "llava_next_video": _same("<image>"),
    "llava_onevision": _same("<image>"),
    "vipllava": _same("<image>"),
    "deepseek_vl": _same("<image_placeholder>"),
    "aya_vision": ImageFamily(
        image_token="<|IMG_PATCH|>", placeholder="<image>", marker="<image>", expand=expansions.aya_tiles
    ),
    "idefics": ImageFamily(
        image_token="<image>",
        placeholder=f"{expansions.FAKE_TOKEN}<image>{expansions.FAKE_TOKEN}",
        marker=f"{expansions.FAKE_TOKEN}<image>{expansions.FAKE_TOKEN}",
        expand=expansions.idefics,
        arrange=expansions.idefics_prompt,
    ),
    "idefics2": _same("<image>", expand=expansions.between_fakes, arrange=expansions.merge_fakes),
    "idefics3": _NUMBERED_TILES,
    "smolvlm": _NUMBERED_TILES,
    "paligemma": _same("<image>", arrange=expansions.paligemma_prompt, adds_special_tokens=False),
    "gemma3": ImageFamily(
        image_token="<image_soft_token>",
        placeholder="<start_of_image>",
        marker="<start_of_image>",
        expand=expansions.gemma,
        is_indivisible=True,
    ),
    "gemma4": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "mllama": _same("<|image|>"),
    "qwen2_vl": _QWEN,
    "qwen2_5_omni_thinker": _QWEN_OMNI,
    "qwen2_5_vl": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_omni_moe_thinker": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "llama4": ImageFamily(
        image_token="<|patch|>", placeholder="<|image|>", marker="<|image|>", expand=expansions.llama4
    ),
    "internvl": _same("<IMG_CONTEXT>", expand=expansions.internvl),
    "mistral3": _PIXTRAL,
    "pixtral": _PIXTRAL,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": _GLM,
}
"""By `model_type`; `pixtral` stands for LLaVA with Pixtral's tower, which is a `llava` in its config."""


_WITHOUT_TOWERS = ("gemma4", "gemma4_unified")
"""Types of which some models have no tower."""


def family_name(config: Mapping[str, Any]) -> str | None:
    """The row's name for a model's config.json; None for a model without a row."""
    name = config.get("model_type")
    if name in _WITHOUT_TOWERS and not isinstance(config.get("vision_config"), Mapping):
        return None
    if name == "llava":
        vision = config.get("vision_config")
        if isinstance(vision, Mapping) and vision.get("model_type") == "pixtral":
            return "pixtral"
    return name if isinstance(name, str) and name in FAMILIES else None
