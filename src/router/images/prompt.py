"""The prompt with its images: text and places of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from router.errors import TemplateError, ValidationError
from router.images.asked import AskedImage, split_markers
from router.images.reader import ImageReader
from router.request import PlacedImage
from wire.images.families import ImageFamily
from wire.images.prepared import PreparedImage, places_of


@dataclass(frozen=True)
class AskedPrompt:
    """Texts around images, one more than these; `marker` stands for each."""

    texts: Sequence[str]
    images: Sequence[AskedImage]
    marker: str


@dataclass(frozen=True)
class ImagePrompt:
    """A text with its images written out."""

    text: str
    images: tuple[PreparedImage, ...] = ()


class SharedPrompt:
    """A prompt whose images a request's copies fetch once."""

    __slots__ = ("_lock", "asked", "prompt")

    def __init__(self) -> None:
        self.asked: AskedPrompt | None = None
        self.prompt: ImagePrompt | None = None
        self._lock: asyncio.Lock | None = None

    async def read(self, prompts: ImagePrompts) -> None:
        """Read `asked` into `prompt`, once."""
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if self.prompt is None:
                assert self.asked is not None
                self.prompt = await prompts.read(self.asked)
                self.asked = None


class ImagePrompts:
    """Makes the prompts of a model that reads images."""

    def __init__(self, family: ImageFamily, token_id: int, bos: str, reader: ImageReader) -> None:
        """Take the family, its token, and BOS's text, if any."""
        self.family = family
        self.reader = reader
        self._token_id = token_id
        self._bos = bos
        self._reserved = tuple(dict.fromkeys((family.image_token, family.placeholder)))

    def check_text(self, text: str, field: str) -> None:
        """Refuse a client's text that stands for an image."""
        for token in self._reserved:
            if token in text:
                raise ValidationError(f"`{field}` contains {token}, which stands for an image", param=field)

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Refuse a client's ids that stand for an image."""
        if self._token_id in ids:
            text = f"`{field}` contains {self.family.image_token}, which stands for an image"
            raise ValidationError(text, param=field)

    def of_text(self, text: str, field: str) -> AskedPrompt:
        """Split a native prompt of a field, reading no image."""
        texts, urls = split_markers(text, self.reader.max_images)
        for one in texts:
            self.check_text(one, field)
        self.reader.check_number(len(urls))
        return AskedPrompt(texts, [AskedImage(url) for url in urls], self.family.marker)

    def of_chat(self, rendered: str, asked: Sequence[AskedImage]) -> AskedPrompt:
        """Split a rendered chat at its placeholders, in order."""
        texts = rendered.split(self.family.placeholder)
        if len(texts) != len(asked) + 1:
            raise TemplateError(f"it shows {len(texts) - 1} images of a chat that has {len(asked)}")
        return AskedPrompt(texts, asked, self.family.placeholder)

    async def read(self, asked: AskedPrompt) -> ImagePrompt:
        """Fetch and prepare the images."""
        images = await self.reader.read(asked.images)
        before, _, behind = asked.marker.partition(self.family.placeholder)
        written = [before + image.expansion + behind for image in images]
        parts = [asked.texts[0]]
        for expansion, text in zip(written, asked.texts[1:], strict=True):
            parts += [expansion, text]
        return ImagePrompt(self.family.arrange("".join(parts), self._bos), images)

    def places(self, ids: Sequence[int], images: Sequence[PreparedImage]) -> tuple[PlacedImage, ...]:
        """Return where images are in the prompt's tokens, for shards that need it."""
        try:
            places = places_of(ids, self._token_id, self.family.image_token, images)
        except ValueError as error:
            raise ValidationError(str(error), reason="invalid_image") from None
        placed = zip(images, places, strict=True)
        return tuple([PlacedImage(image, p, is_indivisible=self.family.is_indivisible) for image, p in placed])
