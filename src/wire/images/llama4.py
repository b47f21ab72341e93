"""Llama 4's image processor, without torchvision.

An image is scaled to the canvas of tiles that loses least, padded with black, cut, and followed by itself in one tile;
rounded to bfloat16 at each step, as transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from transformers.image_processing_base import ImageProcessingMixin

from wire.images.rounding import bfloat16_bits

Canvas = tuple[int, int]
"""Rows and columns of tiles."""

Pixels = npt.NDArray[np.float32]

# What the settings need not say, and what they must not say otherwise.
_DEFAULTS: Mapping[str, Any] = {
    "size": {"height": 336, "width": 336},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_patches": 16,
    "resize_to_max_canvas": False,
    "rescale_factor": 1 / 255,
    "resample": Image.Resampling.BILINEAR,
}
_ALWAYS = ("do_resize", "do_rescale", "do_normalize")


class Llama4Processor:
    """Reads the settings as transformers' processors do: from a model's folder."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises ValueError for settings that are not served."""
        for name in _ALWAYS:
            if settings.get(name, True) is False:
                raise ValueError(f"`{name}` is false, which is not served for this model")
        chosen = {**_DEFAULTS, **{name: value for name, value in settings.items() if value is not None}}
        size = chosen["size"]
        if size["height"] != size["width"]:
            raise ValueError(f"tiles of {size['height']}x{size['width']} pixels are not square")
        self._side = int(size["height"])
        self._fills_canvas = bool(chosen["resize_to_max_canvas"])
        self._scale = np.float32(chosen["rescale_factor"])
        self._mean, self._std = (_rounded(np.asarray(chosen[name], np.float32)) for name in ("image_mean", "image_std"))
        self._resample = Image.Resampling(chosen["resample"])
        most = int(chosen["max_patches"])
        self._canvases = [(rows, n // rows) for n in range(most, 0, -1) for rows in range(1, n + 1) if n % rows == 0]

    @classmethod
    def from_folder(cls, folder: Path) -> Llama4Processor:
        """Raises OSError without settings, ValueError for those that are not served."""
        settings, _ = ImageProcessingMixin.get_image_processor_dict(folder, local_files_only=True)
        return cls(settings)

    def __call__(self, images: Sequence[npt.NDArray[np.uint8]], **options: Any) -> dict[str, Any]:
        """Process one image [height, width, 3].

        Returns:
            pixel_values [tiles, 3, side, side] float32, and aspect_ratios [1, 2] without the last tile.
        """
        (pixels,) = images
        image = Image.fromarray(pixels)
        rows, columns = self.canvas(image.height, image.width)
        side = self._side
        scaled = image.resize(self._scaled(image.height, image.width, (rows, columns)), self._resample)
        padded = np.zeros((rows * side, columns * side, 3), np.uint8)
        padded[: scaled.height, : scaled.width] = np.asarray(scaled)
        tiles = padded.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, side, side)
        if rows * columns > 1:
            whole = np.asarray(image.resize((side, side), self._resample)).transpose(2, 0, 1)
            tiles = np.concatenate([tiles, whole[None]])
        return {"pixel_values": self._normalized(tiles), "aspect_ratios": np.array([[rows, columns]])}

    def canvas(self, height: int, width: int) -> Canvas:
        """Return the canvas that shrinks least, or enlarges least; of equals the smallest, in torch's float32."""
        sides = np.asarray(self._canvases, np.float32) * self._side
        scales = (sides / np.asarray([height, width], np.float32)).min(1)
        enlarging = scales[scales >= 1]
        best = scales.max()  # of the enlarging ones too, if there are any
        if len(enlarging) and not self._fills_canvas:
            best = enlarging.min()
        fitting = [canvas for canvas, scale in zip(self._canvases, scales, strict=True) if scale == best]
        return min(fitting, key=lambda canvas: canvas[0] * canvas[1])

    def _scaled(self, height: int, width: int, canvas: Canvas) -> tuple[int, int]:
        """Return width and height, enlarged to one tile at most, unless it fills the canvas."""
        most_high, most_wide = self._bound(canvas[0], height), self._bound(canvas[1], width)
        by_width, by_height = most_wide / width, most_high / height
        if by_width < by_height:
            return int(most_wide), max(1, min(int(height * by_width), int(most_high)))
        return max(1, min(int(width * by_height), int(most_wide))), int(most_high)

    def _bound(self, tiles: int, length: int) -> int | np.float32:
        """Bound a side, in float32 for the canvas's own, as transformers."""
        most, side = tiles * self._side, max(length, self._side)
        return side if side <= most and not self._fills_canvas else np.float32(most)

    def _normalized(self, tiles: npt.NDArray[np.uint8]) -> Pixels:
        levels = _rounded(np.arange(256, dtype=np.float32) * self._scale)
        values = [_rounded(_rounded(levels - mean) / std) for mean, std in zip(self._mean, self._std, strict=True)]
        return np.stack([values[channel][tiles[:, channel]] for channel in range(3)], 1)


def _rounded(values: Pixels) -> Pixels:
    """To the nearest bfloat16, which stays a float32."""
    return (bfloat16_bits(values).astype("<u4") << 16).view("<f4")
