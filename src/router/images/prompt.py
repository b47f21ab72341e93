"""The prompt with its images: expansions in the text, and where their tokens are."""

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
    """The texts around the images of a prompt, one more than there are images.

    marker: what is written for each, the family's placeholder within it.
    """

    texts: Sequence[str]
    images: Sequence[AskedImage]
    marker: str


@dataclass(frozen=True)
class ImagePrompt:
    """A text whose images are written out, and those images in their order."""

    text: str
    images: tuple[PreparedImage, ...] = ()


class SharedPrompt:
    """A prompt with images, which the copies of a request share: all its choices have its files fetched once."""

    __slots__ = ("_lock", "asked", "prompt")

    def __init__(self) -> None:
        self.asked: AskedPrompt | None = None
        self.prompt: ImagePrompt | None = None
        self._lock: asyncio.Lock | None = None

    async def read(self, prompts: ImagePrompts) -> None:
        """Makes `prompt` of `asked`, unless another copy has. Raises ValidationError and OverloadedError."""
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if self.prompt is None:
                assert self.asked is not None
                self.prompt = await prompts.read(self.asked)
                self.asked = None


class ImagePrompts:
    """Makes the prompts of a model that reads images."""

    def __init__(self, family: ImageFamily, token_id: int, bos: str, reader: ImageReader) -> None:
        """token_id: of the family's image token. bos: the text of BOS, empty where the model has none."""
        self.family = family
        self.reader = reader
        self._token_id = token_id
        self._bos = bos
        self._reserved = tuple(dict.fromkeys((family.image_token, family.placeholder)))

    def check_text(self, text: str, field: str) -> None:
        """Refuses what a client writes in a field to stand for an image. Raises ValidationError."""
        for token in self._reserved:
            if token in text:
                raise ValidationError(f"`{field}` contains {token}, which stands for an image", param=field)

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """As `check_text`, for a prompt of token ids."""
        if self._token_id in ids:
            text = f"`{field}` contains {self.family.image_token}, which stands for an image"
            raise ValidationError(text, param=field)

    def of_text(self, text: str, field: str) -> AskedPrompt:
        """A native prompt, with markers, from a field of that name. Reads no image. Raises ValidationError."""
        texts, urls = split_markers(text, self.reader.max_images)
        for one in texts:
            self.check_text(one, field)
        self.reader.check_number(len(urls))
        return AskedPrompt(texts, [AskedImage(url) for url in urls], self.family.marker)

    def of_chat(self, rendered: str, asked: Sequence[AskedImage]) -> AskedPrompt:
        """A rendered chat, whose placeholders are the images in their order. The texts of the client are checked.

        Raises TemplateError.
        """
        texts = rendered.split(self.family.placeholder)
        if len(texts) != len(asked) + 1:
            raise TemplateError(f"it shows {len(texts) - 1} images of a chat that has {len(asked)}")
        return AskedPrompt(texts, asked, self.family.placeholder)

    async def read(self, asked: AskedPrompt) -> ImagePrompt:
        """The prompt with its images, which are fetched and prepared. Raises ValidationError and OverloadedError."""
        images = await self.reader.read(asked.images)
        before, _, behind = asked.marker.partition(self.family.placeholder)
        written = [before + image.expansion + behind for image in images]
        parts = [asked.texts[0]]
        for expansion, text in zip(written, asked.texts[1:], strict=True):
            parts += [expansion, text]
        return ImagePrompt(self.family.arrange("".join(parts), self._bos), images)

    def places(self, ids: Sequence[int], images: Sequence[PreparedImage]) -> tuple[PlacedImage, ...]:
        """Where the images are in the tokens of their prompt, for model servers that need to know.

        Raises ValidationError where tokens are missing.
        """
        try:
            places = places_of(ids, self._token_id, self.family.image_token, images)
        except ValueError as error:
            raise ValidationError(str(error), reason="invalid_image") from None
        placed = zip(images, places, strict=True)
        return tuple([PlacedImage(image, p, is_indivisible=self.family.is_indivisible) for image, p in placed])
