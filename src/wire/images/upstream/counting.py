"""The image tokens of a file as the model servers of upstream TGI count them. They prepare the files themselves.

They do not turn an image as its EXIF says, and they change some settings of the model's processor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from wire.images.decoding import ImageError, decode
from wire.images.expansions import Layout
from wire.images.prepared import Detail, PreparedImage
from wire.images.preparing import Preparer, UnpreparableError
from wire.images.upstream.texts import TYPES

_QWEN = ("qwen2_vl", "qwen2_5_vl")
_NARROW = 20  # pixels: images of Qwen up to this width are doubled
_IDEFICS2_ROWS = 64  # of a tile
_IDEFICS3_LONGEST = 1456  # pixels that an image is reduced to
_GEMMA3_ROWS = 256


class FileCounter:
    """Checks the files of images, and counts their tokens, for one model."""

    def __init__(self, folder: Path) -> None:
        """folder: with config.json and the processor's settings. Raises UnpreparableError."""
        self._preparer = preparer = Preparer(folder, "float32")
        if preparer.name not in TYPES:
            raise UnpreparableError(f"upstream TGI reads no images of the model type {preparer.name}")
        if preparer.name == "idefics3":
            preparer.processor.size = {"longest_edge": _IDEFICS3_LONGEST}

    def prepare(self, key: bytes, data: bytes, *, max_pixels: int, detail: Detail = "auto") -> PreparedImage:
        """The file's image without what a tower takes. Raises ImageError, and MemoryError."""
        if detail == "low":
            raise ImageError("the model server in use reads images in their full size only, not with `detail` low")
        image = decode(data, max_pixels=max_pixels, turns=False)
        layout = self._layout(image)
        return PreparedImage(
            key=key,
            expansion=self._preparer.family.expansion(layout),
            num_embeds=layout.num_embeds,
            num_pixels=image.width * image.height,
        )

    def _layout(self, image: Image.Image) -> Layout:
        name, config = self._preparer.name, self._preparer.config
        if name in _QWEN and image.width <= _NARROW:
            image = image.resize((2 * image.width, 2 * image.height))
        _, layout = self._preparer.read(image)
        if name == "gemma3":
            return Layout(_GEMMA3_ROWS)
        if name == "idefics2":
            num_tiles = layout.num_embeds // layout.per_tile
            return Layout(_IDEFICS2_ROWS * num_tiles, per_tile=_IDEFICS2_ROWS)
        if name == "llava_next" and _llava_next_tokens(image, config) != layout.num_embeds:
            # Its tower makes as many rows as ours: a forward with another number of tokens ends the process.
            raise ImageError(f"the model server in use miscounts images of {image.width}x{image.height} pixels")
        return layout


def _llava_next_tokens(image: Image.Image, config: Any) -> int:
    """With the sides of the grid exchanged."""
    from transformers.image_processing_utils import select_best_resolution

    side = int(config.vision_config.image_size)
    patches = side // int(config.vision_config.patch_size)
    height, width = image.height, image.width
    best_height, best_width = select_best_resolution((height, width), config.image_grid_pinpoints)
    lines, in_line = patches * (best_width // side), patches * (best_height // side)
    if width / height > in_line / lines:
        lines -= (lines - height * in_line // width) // 2 * 2
    else:
        in_line -= (in_line - width * lines // height) // 2 * 2
    return int(lines * in_line + lines + patches**2)
