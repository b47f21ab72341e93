"""From named images to the tower's inputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.errors import ImageError
from router.images.asked import AskedImage, data_of
from router.images.store import ImageStore
from router.images.workers import ImageWorkers
from router.metrics import Metrics
from wire.images.frames import Job
from wire.images.prepared import PreparedImage

_PIXELS_OF_A_REQUEST = 2  # as many images of the largest size


class Fetcher(Protocol):
    """Gets files from the network."""

    async def fetch(self, url: str, max_bytes: int) -> bytes:
        """Fetch a file; refusals have fixed reasons."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """A request's images, bytes of a file, pixels of an image (a request: twice)."""

    max_images: int
    max_bytes: int
    max_pixels: int


class ImageReader:
    """Reads each request's images in turn; shared ones are prepared once."""

    def __init__(
        self, workers: ImageWorkers, store: ImageStore, fetcher: Fetcher, limits: ImageLimits, metrics: Metrics
    ) -> None:
        self._workers = workers
        self._store = store
        self._fetcher = fetcher
        self._limits = limits
        self._metrics = metrics
        self._running: dict[bytes, asyncio.Lock] = {}

    @property
    def max_images(self) -> int:
        return self._limits.max_images

    def check_number(self, number: int) -> None:
        """Raises ValidationError."""
        if number > self._limits.max_images:
            raise ImageError(f"a request may have up to {self._limits.max_images} images. Given: {number}")

    async def read(self, asked: Sequence[AskedImage]) -> tuple[PreparedImage, ...]:
        """Read the images, in order."""
        self.check_number(len(asked))
        left = _PIXELS_OF_A_REQUEST * self._limits.max_pixels
        images: list[PreparedImage] = []
        for one in asked:
            if one.prepared is None:
                one.prepared = await self._read(one, left, images)
            left -= one.prepared.num_pixels
            if left < 0:
                most = _PIXELS_OF_A_REQUEST * self._limits.max_pixels
                raise ImageError(f"invalid image: the images of a request may have {most} pixels in all")
            images.append(one.prepared)
        return tuple(images)

    def close(self) -> None:
        self._workers.close()
        self._fetcher.close()

    async def _read(self, asked: AskedImage, max_pixels: int, others: Sequence[PreparedImage]) -> PreparedImage:
        """others: images of the same request."""
        self._store.check_memory()
        data, key = await self._file(asked)
        lock = self._running.setdefault(key, asyncio.Lock())
        try:
            async with lock:  # the first prepares it, the others find it
                image = self._store.find(key)
                if image is None:
                    began = time.monotonic()
                    job = Job(key, data, min(max_pixels, self._limits.max_pixels), asked.detail)
                    image = await self._workers.prepare(job)
                    self._check_size([*others, image])
                    image = self._store.add(image)
                    self._metrics.observe("tgi_image_prepare_duration", time.monotonic() - began)
        finally:
            if not lock.locked() and self._running.get(key) is lock:
                del self._running[key]
        self._metrics.count("tgi_image_count")
        self._metrics.observe("tgi_image_tokens", image.num_embeds)
        return image

    def _check_size(self, images: Sequence[PreparedImage]) -> None:
        """Refuse too many pixels at once, finally."""
        most = self._store.memory_bytes
        if sum({image.key: image.num_bytes for image in images}.values()) > most:
            raise ImageError(
                f"the images of the request take more than {most >> 20} MiB once they are prepared "
                "(--max-image-memory-mib): send fewer or smaller ones"
            )

    async def _file(self, asked: AskedImage) -> tuple[bytes, bytes]:
        """Return bytes and key, decoded in a thread."""
        url, max_bytes = asked.url, self._limits.max_bytes
        if url.startswith("data:"):
            data = await asyncio.to_thread(data_of, url, max_bytes)
            assert data is not None
        elif url.startswith(("http://", "https://")):
            began = time.monotonic()
            data = await self._fetcher.fetch(url, max_bytes)
            self._metrics.observe("tgi_image_fetch_duration", time.monotonic() - began)
        else:
            raise ImageError(f"invalid image content: {url[:50]}")
        return data, await asyncio.to_thread(self._workers.key, data, asked.detail)


class NoFetcher:
    """Allows data URLs only."""

    async def fetch(self, url: str, max_bytes: int) -> bytes:
        raise ImageError("Could not fetch image: this server fetches no images; send it as a data URL")

    def close(self) -> None:
        """Nothing is open."""
