"""Made-up images for the warm-up, prepared as the router does."""

from __future__ import annotations

import hashlib
import io
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch

from model_server.vision.image import Feature, Image

if TYPE_CHECKING:
    from wire.images.preparing import Preparer

logger = logging.getLogger(__name__)

# Pixels of the smallest that is tried, how often they are doubled, and after how many doublings that give no more
# tokens the search ends.
_SMALLEST, _DOUBLINGS, _PATIENCE = 2**16, 9, 3
# Width by height: a whole number of tiles for the families that cut images into up to four, nine, twelve or sixteen.
_ASPECTS = (1.0, 4 / 3)


class SampleImages:
    """A grey image of any size."""

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer

    def small(self) -> Image:
        """Raises `ImageError` of `wire.images.decoding`."""
        return self._prepared(64, 96)

    def largest(self, most_tokens: int) -> Image:
        """Return the image of most tokens that a prompt holds, else the smallest."""
        found, stale = self.small(), 0
        for area in (_SMALLEST << doubling for doubling in range(_DOUBLINGS)):
            made = list(self._of_area(area))
            fitting = [image for image in made if found.num_embeds < image.num_embeds <= most_tokens]
            stale = 0 if fitting else stale + 1
            found = max([found, *fitting], key=lambda image: image.num_embeds)
            if stale == _PATIENCE or all(image.num_embeds > most_tokens for image in made):
                break
        return found

    def _of_area(self, area: int) -> Iterator[Image]:
        for aspect in _ASPECTS:
            height = math.isqrt(int(area / aspect))
            yield self._prepared(height, int(height * aspect))

    def _prepared(self, height: int, width: int) -> Image:
        from PIL import Image as Pil

        file = io.BytesIO()
        Pil.new("RGB", (width, height), (128, 128, 128)).save(file, "PNG", compress_level=1)
        key = hashlib.sha256(f"warm-up {height} {width}".encode()).digest()
        made = self._preparer.prepare(key, file.getvalue(), max_pixels=height * width)
        features = {name: Feature(one.dtype, one.shape, one.data) for name, one in made.features.items()}
        return Image(key, features, made.num_embeds, made.grid or ())


def sample_images(directory: Path, dtype: torch.dtype) -> SampleImages | None:
    """Prepare samples, if images can be; imports transformers."""
    from wire.images.preparing import Preparer, UnpreparableError

    name = str(dtype).removeprefix("torch.")
    try:
        return SampleImages(Preparer(directory, cast(Literal["float32", "bfloat16", "float16"], name)))
    except UnpreparableError as error:
        logger.warning("The warm-up encodes no image: %s", error)
        return None
