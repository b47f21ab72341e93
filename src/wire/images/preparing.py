"""From a file to a tower's inputs, by transformers' processors without torch.

To stay small, a process puts None for torch and torchvision into `sys.modules` before importing this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor

from wire.images import layouts
from wire.images.decoding import ImageError, decode
from wire.images.expansions import Layout
from wire.images.families import FAMILIES, family_name
from wire.images.gemma4_unified import gemma4_unified_processor
from wire.images.layouts import LayoutOf
from wire.images.llama4 import Llama4Processor
from wire.images.prepared import Detail, Feature, FeatureType, PreparedImage
from wire.images.rounding import bfloat16_bits

ModelType = FeatureType
"""`float32`, `bfloat16` or `float16`: in which the tower computes."""


class UnpreparableError(Exception):
    """The model's images cannot be prepared at all; the text says why, for the operator."""


def _transformers_processor(folder: Path) -> Any:
    load: Any = AutoImageProcessor.from_pretrained
    return load(folder, backend="pil", local_files_only=True)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """How a family's processor is used."""

    layout: LayoutOf
    # What the tower takes of its results.
    features: tuple[str, ...] = ("pixel_values",)
    # It takes lists of images.
    nested: bool = False
    has_grid: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    # Reads settings from the folder.
    load: Callable[[Path], Any] = _transformers_processor


_LLAVA_NEXT = _Row(layout=layouts.llava_next, features=("pixel_values", "image_sizes"))
_TILES = _Row(
    layout=layouts.idefics3,
    features=("pixel_values", "pixel_attention_mask"),
    nested=True,
    options={"return_row_col_info": True},
)
_GRID = _Row(layout=layouts.merged_grid, features=("pixel_values", "image_grid_thw"), has_grid=True)
_GEMMA4 = _Row(layout=layouts.gemma4, features=("pixel_values", "image_position_ids"))
_PIXTRAL = _Row(layout=layouts.pixtral, features=("pixel_values", "image_sizes"))

_ROWS: Mapping[str, _Row] = {
    "llava": _Row(layout=layouts.llava),
    "llava_next": _LLAVA_NEXT,
    "llava_next_video": _LLAVA_NEXT,
    "llava_onevision": _Row(layout=layouts.llava_onevision, features=("pixel_values", "image_sizes")),
    "vipllava": _Row(layout=layouts.patches),
    "deepseek_vl": _Row(layout=layouts.patches),
    "aya_vision": _Row(layout=layouts.aya_vision, options={"crop_to_patches": True}),
    "idefics2": _Row(layout=layouts.idefics2, features=("pixel_values", "pixel_attention_mask"), nested=True),
    "idefics3": _TILES,
    "smolvlm": _TILES,
    "paligemma": _Row(layout=layouts.patches),
    "gemma3": _Row(layout=layouts.gemma3, nested=True, options={"do_pan_and_scan": False}),
    "gemma4": _GEMMA4,
    "gemma4_unified": replace(_GEMMA4, load=gemma4_unified_processor),
    "idefics": _Row(layout=layouts.one_token),
    "mllama": _Row(
        layout=layouts.one_token, features=("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"), nested=True
    ),
    "qwen2_vl": _GRID,
    "qwen2_5_omni_thinker": _GRID,
    "qwen2_5_vl": _GRID,
    "qwen3_5": _GRID,
    "qwen3_5_moe": _GRID,
    "qwen3_omni_moe_thinker": _GRID,
    "qwen3_vl": _GRID,
    "qwen3_vl_moe": _GRID,
    "llama4": _Row(layout=layouts.llama4, load=Llama4Processor.from_folder),
    "internvl": _Row(layout=layouts.internvl, options={"crop_to_patches": True}),
    "mistral3": _PIXTRAL,
    "pixtral": _PIXTRAL,
    "glm4v": _GRID,
    "glm4v_moe": _GRID,
    "glm46v": _GRID,
}


class Preparer:
    """Prepares images for one model, whose `name` is its row's."""

    def __init__(self, folder: Path, dtype: ModelType) -> None:
        """folder: with config.json and the processor's settings. Raises UnpreparableError."""
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            self.config = getattr(config, "thinker_config", config)  # of a model that speaks, the part that reads
            name = family_name(self.config.to_dict())
        except Exception as error:
            raise UnpreparableError(f"the config of the model cannot be read: {_line(error)}") from None
        if name is None or name not in _ROWS:
            raise UnpreparableError(f"images of the model type {self.config.model_type} are not served")
        self.name, self.family, self._row = name, FAMILIES[name], _ROWS[name]
        self._dtype = dtype
        self._options = dict(self._row.options)
        if self._row is _PIXTRAL:
            self._options["patch_size"] = layouts.pixtral_patch(self.config)
        try:
            self.processor = self._row.load(folder)
        except Exception as error:
            raise UnpreparableError(f"the image processor of the model cannot be loaded: {_line(error)}") from None

    def prepare(self, key: bytes, data: bytes, *, max_pixels: int, detail: Detail = "auto") -> PreparedImage:
        """The image of a file. Raises ImageError, and MemoryError."""
        image = decode(data, max_pixels=max_pixels, detail=detail)
        arrays, layout = self.read(image)
        return PreparedImage(
            key=key,
            expansion=self.family.expansion(layout),
            num_embeds=layout.num_embeds,
            grid=layouts.grid(arrays, self.config) if self._row.has_grid else None,
            features={name: feature_of(arrays[name], self._dtype) for name in self._row.features if name in arrays},
            num_pixels=image.width * image.height,
        )

    def read(self, image: Image.Image) -> tuple[Mapping[str, Any], Layout]:
        """What the processor makes of an image, and its image tokens. Raises ImageError, and MemoryError."""
        try:
            arrays = self._arrays(image)
            layout = self._row.layout(arrays, self.config, self.processor)
        except MemoryError:
            raise
        except Exception:  # what shrinks to nothing, and what is too narrow: each processor raises something else
            raise ImageError(f"the model cannot read {image.width}x{image.height} pixels") from None
        if layout.num_embeds < 1:
            raise ImageError(f"nothing is left of {image.width}x{image.height} pixels")
        return arrays, layout

    def _arrays(self, image: Image.Image) -> Mapping[str, Any]:
        pixels = np.asarray(image)
        images: list[Any] = [[pixels]] if self._row.nested else [pixels]
        made = self.processor(images, return_tensors="np", input_data_format="channels_last", **self._options)
        return made if isinstance(made, Mapping) else {"pixel_values": made}  # the one of Idefics has one array


def feature_of(array: Any, dtype: ModelType) -> Feature:
    """Convert pixels to the model's dtype, to nearest even; masks to bool; others to int64."""
    array = np.asarray(array)
    shape = tuple(array.shape)
    if array.dtype.kind == "f":
        return Feature(dtype, shape, _float_bytes(array.astype("<f4", copy=False), dtype))
    if array.dtype.kind == "b" or (array.ndim > 2 and array.size and array.max() <= 1 and array.min() >= 0):
        return Feature("bool", shape, array.astype(np.bool_).tobytes())
    return Feature("int64", shape, array.astype("<i8").tobytes())


def _float_bytes(array: Any, dtype: ModelType) -> bytes:
    if dtype == "bfloat16":
        return bytes(bfloat16_bits(array).tobytes())
    return bytes(array.astype("<f2" if dtype == "float16" else "<f4").tobytes())


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
