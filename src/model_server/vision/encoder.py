"""Encodes images that are not encoded yet, and keeps what it has made.

An entry is held as long as a sequence refers to it, and beyond that while there is room: the longest unused go first.
"""

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
    """A tower and the cache of its results. Not thread-safe: it belongs to the device thread.

    capacity: rows that are kept; more only while running requests still need them. hits, misses: images that were
    there when a step wanted them, and that had to be encoded.
    """

    def __init__(
        self,
        tower: SeesImages,
        capacity: int | None = None,
        ranks: ProcessGroup | None = None,
        samples: SampleImages | None = None,
    ) -> None:
        """capacity: None: what `begin` makes of the router's limits. ranks: those that run the same steps, each with a
        tower of its own; None: this one alone. samples: for the warm-up; None: it encodes none."""
        self.tower = tower
        self._ranks = ranks or ProcessGroup()
        self._samples = samples
        self._asked = capacity
        self._most_tokens = 0
        self.capacity = capacity or 0
        self.hits = 0
        self.misses = 0
        self.encode_ns = 0
        self._told = EncodedImages()
        self._alive: WeakValueDictionary[bytes, Encoded] = WeakValueDictionary()
        self._recent: OrderedDict[bytes, Encoded] = OrderedDict()

    def take_counts(self) -> EncodedImages | None:
        """What was found and encoded since the last call; None: nothing."""
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

    def begin(self, most_tokens: int) -> None:
        """A router begins, whose prompts, or steps, have at most so many tokens. Nothing is kept of before."""
        self._recent.clear()
        self._most_tokens = most_tokens
        self.capacity = self._asked or 2 * most_tokens

    def try_out(self, *, largest: bool) -> Encoded | None:
        """Encode an image that is made up, the largest that a prompt may have or a small one. It is not kept.

        Raises what preparing it and the tower raise, RequestError if the tower makes another number of rows of it than
        the image has tokens.
        """
        if self._samples is None:
            return None
        return self.tower.encode(self._samples.largest(self._most_tokens) if largest else self._samples.small())

    def all_succeeded(self, succeeded: bool) -> bool:
        """Whether every rank could encode a request's images, so that all leave the same ones out. All ranks call this
        together."""
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
