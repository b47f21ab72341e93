"""Prepared images in memory, of running requests and recent ones."""

from __future__ import annotations

import weakref
from collections import OrderedDict

from router.errors import OverloadedError
from wire.images.prepared import PreparedImage

_RETRY_AFTER_S = 5


class ImageStore:
    """Keeps recent images up to `cache_bytes`, all alive up to `memory_bytes`."""

    def __init__(self, *, cache_bytes: int, memory_bytes: int) -> None:
        self._cache_bytes = cache_bytes
        self.memory_bytes = memory_bytes
        self._cached: OrderedDict[bytes, PreparedImage] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[bytes, PreparedImage] = weakref.WeakValueDictionary()
        self.num_cached_bytes = 0
        self.num_bytes = 0
        """Of all images that a request or the cache holds."""

    def find(self, key: bytes) -> PreparedImage | None:
        """Return a cached or running request's image."""
        if key in self._cached:
            self._cached.move_to_end(key)
        return self._alive.get(key)

    def add(self, image: PreparedImage) -> PreparedImage:
        """Return the image to use for its key, if memory allows."""
        present = self.find(image.key)
        if present is not None:
            return present
        size = image.num_bytes
        while self._cached and self.num_bytes + size > self.memory_bytes:
            self._evict()
        if self.num_bytes + size > self.memory_bytes:
            raise OverloadedError(_RETRY_AFTER_S)
        self.num_bytes += size
        weakref.finalize(image, self._gone, size).atexit = False
        self._alive[image.key] = image
        if size <= self._cache_bytes:
            self._cached[image.key] = image
            self.num_cached_bytes += size
            while self.num_cached_bytes > self._cache_bytes:
                self._evict()
        return image

    def check_memory(self) -> None:
        """Refuse if requests fill the memory, before fetching."""
        if self.num_bytes - self.num_cached_bytes >= self.memory_bytes:
            raise OverloadedError(_RETRY_AFTER_S)

    def _evict(self) -> None:
        _, image = self._cached.popitem(last=False)
        self.num_cached_bytes -= image.num_bytes

    def _gone(self, size: int) -> None:
        self.num_bytes -= size
