"""Encodes images and keeps results, as long as sequences refer to them, or room allows; made-up ones in a warm-up."""

from __future__ import annotations

import hashlib
import io
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast
from weakref import WeakValueDictionary

import torch

from model_server.distributed.group import ProcessGroup
from model_server.features.images.image import Encoded, EncodedImages, Feature, Image, SeesImages

if TYPE_CHECKING:  # it loads an image library, which a shard of a text model does not need
    from wire.images.preparing import Preparer

logger = logging.getLogger(__name__)

# Pixels of the smallest that is tried, how often they are doubled, and after how many doublings that give no more
# tokens the search ends.
_SMALLEST, _DOUBLINGS, _PATIENCE = 2**16, 9, 3
# Width by height: a whole number of tiles for the families that cut images into up to four, nine, twelve or sixteen.
_ASPECTS = (1.0, 4 / 3)


class ImageEncoder:
    """A tower and its cache, on the device thread."""

    def __init__(
        self,
        tower: SeesImages,
        capacity: int | None = None,
        ranks: ProcessGroup | None = None,
        samples: SampleImages | None = None,
    ) -> None:
        """Take a tower.

        Args:
            capacity: None: by the router's limits.
            ranks: With towers of their own, if others.
            samples: For the warm-up, if it encodes.
        """
        self.tower = tower
        self._ranks = ranks or ProcessGroup()
        self._samples = samples
        self._asked = capacity
        self._most_tokens = 0
        # Rows kept; more only while requests need them.
        self.capacity = capacity or 0
        # Images found (`misses`: encoded) for steps.
        self.hits = 0
        self.misses = 0
        self.encode_ns = 0
        self._told = EncodedImages()
        self._alive: WeakValueDictionary[bytes, Encoded] = WeakValueDictionary()
        self._recent: OrderedDict[bytes, Encoded] = OrderedDict()

    def take_counts(self) -> EncodedImages | None:
        """Return what was found and encoded since the last call."""
        counted = (self.hits - self._told.hits, self.misses - self._told.misses, self.encode_ns - self._told.encode_ns)
        self._told = EncodedImages(self.hits, self.misses, self.encode_ns)
        return EncodedImages(*counted) if any(counted) else None

    @property
    def is_alone(self) -> bool:
        """No other rank encodes the same images."""
        return self._ranks.size == 1

    @property
    def num_rows(self) -> int:
        """Rows in memory, kept or still needed."""
        return sum(len(encoded.rows) for encoded in self._alive.values())

    def start(self, most_tokens: int) -> None:
        """Begin a router's session, forgetting all."""
        self._recent.clear()
        self._most_tokens = most_tokens
        self.capacity = self._asked or 2 * most_tokens

    def try_out(self, *, largest: bool) -> Encoded | None:
        """Encode a made-up image, the largest of a prompt or a small one, without keeping it.

        Raises:
            RequestError: The tower makes other rows than the image has tokens.
        """
        if self._samples is None:
            return None
        return self.tower.encode(self._samples.largest(self._most_tokens) if largest else self._samples.small())

    def all_succeeded(self, succeeded: bool) -> bool:
        """Whether every rank encoded a request's images; all ranks together."""
        return bool(self._ranks.all_reduce_min(int(succeeded)))

    def find(self, image: Image) -> Encoded:
        """Raises what the tower raises."""
        found = self._alive.get(image.key)
        if found is not None:
            self.hits += 1
        else:
            began = time.perf_counter_ns()
            found = self._alive[image.key] = self.tower.encode(image)
            self.misses += 1
            self.encode_ns += time.perf_counter_ns() - began
        self._recent[image.key] = found
        self._recent.move_to_end(image.key)
        while self.num_rows > self.capacity and len(self._recent) > 1:
            self._recent.popitem(last=False)
        return found


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
