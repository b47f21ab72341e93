"""Encodes images and keeps results, as long as sequences refer to them, or room allows."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from model_server.distributed.group import ProcessGroup
from model_server.vision.image import Encoded, EncodedImages, Image, SeesImages

if TYPE_CHECKING:  # it loads an image library, which a shard of a text model does not need
    from model_server.vision.samples import SampleImages


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
