"""An image's tokens by processor's arrays and config, as its tower makes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from wire.images.expansions import Layout

Arrays = Mapping[str, Any]
"""What a processor returns for one image, by name: arrays of numpy, the batch dimension kept, or nested lists."""

LayoutOf = Callable[[Arrays, Any, Any], Layout]
"""From arrays, the model's config and the processor."""

_SCALED_FROM = 1.1  # of LLaVA-OneVision, as its modelling has it
_WITH_CLASS_TOKEN = ("clip_vision_model",)


def llava(arrays: Arrays, config: Any, processor: Any) -> Layout:
    height, width = arrays["pixel_values"].shape[-2:]
    return Layout(_patches(height, config) * _patches(width, config) + _others(config))


def llava_next(arrays: Arrays, config: Any, processor: Any) -> Layout:
    """The whole image, and its tiles without what only pads them, with a token behind each line."""
    lines, in_line, whole = _tiled(arrays, config, processor)
    return Layout(lines * in_line + lines + whole + _others(config))


def llava_onevision(arrays: Arrays, config: Any, processor: Any) -> Layout:
    """Count as LLaVA-NeXT, with tiles scaled down to `vision_aspect_ratio`'s tokens."""
    lines, in_line, whole = _tiled(arrays, config, processor)
    most = int(config.vision_aspect_ratio.removeprefix("anyres_max_")) * whole
    ratio = math.sqrt(lines * in_line / most)
    if ratio > _SCALED_FROM:
        lines, in_line = int(lines // ratio), int(in_line // ratio)
    return Layout(lines * in_line + lines + whole + _others(config))


def _tiled(arrays: Arrays, config: Any, processor: Any) -> tuple[int, int, int]:
    """Return tiles, lines and their tokens without padding, and the whole image's tokens."""
    from transformers.image_processing_utils import select_best_resolution

    height, width = (int(side) for side in arrays["image_sizes"][0])
    tile_height, tile_width = arrays["pixel_values"].shape[-2:]
    rows, columns = _patches(tile_height, config), _patches(tile_width, config)
    best_height, best_width = select_best_resolution((height, width), processor.image_grid_pinpoints)
    lines, in_line = rows * (best_height // tile_height), columns * (best_width // tile_width)
    if width / height > in_line / lines:
        lines -= (lines - int(round(height * (in_line / width), 7))) // 2 * 2
    else:
        in_line -= (in_line - int(round(width * (lines / height), 7))) // 2 * 2
    return lines, in_line, rows * columns


def idefics2(arrays: Arrays, config: Any, processor: Any) -> Layout:
    per_tile = int(config.perceiver_config.resampler_n_latents)
    return Layout(per_tile * arrays["pixel_values"].shape[1], per_tile=per_tile)


def idefics3(arrays: Arrays, config: Any, processor: Any) -> Layout:
    vision = config.vision_config
    per_tile = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2
    rows, columns = int(arrays["rows"][0][0]), int(arrays["cols"][0][0])
    return Layout(per_tile * (rows * columns + 1), rows=rows, columns=columns, per_tile=per_tile)


def patches(arrays: Arrays, config: Any, processor: Any) -> Layout:
    """A token for each."""
    height, width = arrays["pixel_values"].shape[-2:]
    return Layout(_patches(height, config) * _patches(width, config))


def aya_vision(arrays: Arrays, config: Any, processor: Any) -> Layout:
    tiles, _, height, width = arrays["pixel_values"].shape
    per_tile = _patches(height, config) * _patches(width, config) // config.downsample_factor**2
    return Layout(per_tile * tiles, per_tile=per_tile)


def gemma3(arrays: Arrays, config: Any, processor: Any) -> Layout:
    return Layout(int(config.mm_tokens_per_image))


def gemma4(arrays: Arrays, config: Any, processor: Any) -> Layout:
    return Layout(int(arrays["num_soft_tokens_per_image"][0]))


def merged_grid(arrays: Arrays, config: Any, processor: Any) -> Layout:
    """Qwen and GLM: patches of the grid, `spatial_merge_size` squared of them in one token."""
    frames, rows, columns = grid(arrays, config)
    return Layout(frames * rows * columns, rows=rows, columns=columns)


def one_token(arrays: Arrays, config: Any, processor: Any) -> Layout:
    """Layers of cross attention read the image; a token says where it is."""
    return Layout(1)


def internvl(arrays: Arrays, config: Any, processor: Any) -> Layout:
    return Layout(int(config.image_seq_length) * arrays["pixel_values"].shape[0])


def llama4(arrays: Arrays, config: Any, processor: Any) -> Layout:
    tiles, _, height, width = arrays["pixel_values"].shape
    patches = _patches(height, config) * _patches(width, config)
    per_tile = patches // round(1 / config.vision_config.pixel_shuffle_ratio**2)
    rows, columns = (0, 0) if tiles == 1 else (int(n) for n in arrays["aspect_ratios"][0])
    return Layout(per_tile * tiles, rows=rows, columns=columns, per_tile=per_tile)


def pixtral(arrays: Arrays, config: Any, processor: Any) -> Layout:
    side = pixtral_patch(config)
    rows, columns = (int(length) // side for length in arrays["image_sizes"][0])
    return Layout(rows * columns, rows=rows, columns=columns)


def pixtral_patch(config: Any) -> int:
    """Pixels a side of what becomes one token."""
    return int(config.vision_config.patch_size) * int(getattr(config, "spatial_merge_size", 1))


def grid(arrays: Arrays, config: Any) -> tuple[int, int, int]:
    """Merged patches: frames, rows, columns."""
    merge = int(config.vision_config.spatial_merge_size)
    frames, rows, columns = (int(length) for length in arrays["image_grid_thw"][0])
    return frames, rows // merge, columns // merge


def _patches(side: int, config: Any) -> int:
    return int(side) // int(config.vision_config.patch_size)


def _others(config: Any) -> int:
    """Rows besides those of the patches: the tower's class token, less the row that "default" leaves out."""
    has_class_token = config.vision_config.model_type in _WITH_CLASS_TOKEN
    return int(has_class_token) - int(config.vision_feature_select_strategy == "default")
