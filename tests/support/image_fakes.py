"""Images without processes: prepared in the test's own, and files from a dictionary."""

from __future__ import annotations

import hashlib
from pathlib import Path

from router.errors import ValidationError
from router.images.asked import invalid
from router.images.prompt import ImagePrompts
from router.images.reader import ImageLimits, ImageReader
from router.images.store import ImageStore
from router.metrics import Metrics
from wire.images.decoding import ImageError
from wire.images.families import FAMILIES
from wire.images.frames import Job
from wire.images.prepared import Detail, PreparedImage
from wire.images.preparing import Preparer


class Workers:
    """Counts what it prepares."""

    def __init__(self, folder: Path) -> None:
        self._preparer = Preparer(folder, "float32")
        self.prepared: list[Job] = []

    def key(self, data: bytes, detail: Detail) -> bytes:
        return hashlib.sha256(detail.encode() + data).digest()

    async def prepare(self, job: Job) -> PreparedImage:
        self.prepared.append(job)
        try:
            return self._preparer.prepare(job.key, job.data, max_pixels=job.max_pixels, detail=job.detail)
        except ImageError as error:
            raise invalid(str(error)) from None

    def close(self) -> None: ...


class Files:
    """Answers from a dictionary, and counts."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.fetched: list[str] = []

    async def fetch(self, url: str, max_bytes: int) -> bytes:
        self.fetched.append(url)
        if url not in self.files:
            raise ValidationError("Could not fetch image: status 404")
        return self.files[url]

    def close(self) -> None:
        pass


class Images:
    """All of it for the family `llava` of a folder."""

    def __init__(
        self,
        folder: Path,
        token_id: int,
        *,
        files: dict[str, bytes] | None = None,
        family: str = "llava",
        cache_bytes: int = 1 << 24,
        memory_bytes: int = 1 << 25,
        max_images: int = 3,
        max_bytes: int = 100_000,
        max_pixels: int = 100_000,
    ) -> None:
        self.workers = Workers(folder)
        self.files = Files(files or {})
        self.store = ImageStore(cache_bytes=cache_bytes, memory_bytes=memory_bytes)
        self.metrics = Metrics()
        limits = ImageLimits(max_images=max_images, max_bytes=max_bytes, max_pixels=max_pixels)
        reader = ImageReader(self.workers, self.store, self.files, limits, self.metrics)  # type: ignore[arg-type]
        self.prompts = ImagePrompts(FAMILIES[family], token_id, "<s>", reader)
