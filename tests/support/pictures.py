"""Pictures that tests draw, as files."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def pixels(height: int, width: int, seed: int = 0) -> Any:
    """[height, width, 3], uint8: coloured stripes and a square, other ones for each seed."""
    rows, columns = np.mgrid[:height, :width]
    waves = [np.sin((rows * (1 + seed % 3) + columns * (channel + 1)) / 9 + seed) for channel in range(3)]
    drawn = (np.stack(waves, -1) * 90 + 128).astype(np.uint8)
    drawn[height // 4 : height // 2, width // 4 : width // 2] = (seed * 37) % 256
    return drawn


def picture(height: int, width: int, seed: int = 0, *, format: str = "PNG", **options: Any) -> bytes:
    """A file of these pixels."""
    return saved(Image.fromarray(pixels(height, width, seed)), format, **options)


def saved(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()
