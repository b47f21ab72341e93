"""The prompt with its images: expansions in the text, and where their tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.errors import TemplateError, ValidationError
from router.images.asked import AskedImage, split_markers
from router.images.reader import ImageReader
from router.request import PlacedImage
from wire.images.families import ImageFamily
from wire.images.prepared import ImagePlace, PreparedImage


@dataclass(frozen=True)
class ImagePrompt:
    """A text whose images are written out, and those images in their order."""

    text: str
    images: tuple[PreparedImage, ...] = ()


class ImagePrompts:
    """Makes the prompts of a model that reads images."""

    def __init__(self, family: ImageFamily, token_id: int, bos: str, reader: ImageReader) -> None:
        """token_id: of the family's image token. bos: the text of BOS, empty where the model has none."""
        self.family = family
        self.reader = reader
        self._token_id = token_id
        self._bos = bos
        self._reserved = tuple(dict.fromkeys((family.image_token, family.placeholder)))

    def check_text(self, text: str) -> None:
        """Refuses what a client writes to stand for an image. Raises ValidationError."""
        for token in self._reserved:
            if token in text:
                raise ValidationError(f"`inputs` contains {token}, which stands for an image")

    def check_ids(self, ids: Sequence[int]) -> None:
        """As `check_text`, for a prompt of token ids."""
        if self._token_id in ids:
            raise ValidationError(f"`inputs` contains {self.family.image_token}, which stands for an image")

    async def of_text(self, text: str) -> ImagePrompt:
        """A native prompt, with markers. Raises ValidationError and OverloadedError."""
        texts, urls = split_markers(text, self.reader.max_images)
        for one in texts:
            self.check_text(one)
        self.reader.check_number(len(urls))
        images = await self.reader.read([AskedImage(url) for url in urls])
        before, _, behind = self.family.marker.partition(self.family.placeholder)
        expansions = [f"{before}{image.expansion}{behind}" for image in images]
        return self._arranged(texts, expansions, images)

    async def of_chat(self, rendered: str, asked: Sequence[AskedImage]) -> ImagePrompt:
        """A rendered chat, whose placeholders are the images in their order. The texts of the client are checked.

        Raises TemplateError, ValidationError and OverloadedError.
        """
        texts = rendered.split(self.family.placeholder)
        if len(texts) != len(asked) + 1:
            raise TemplateError(f"it shows {len(texts) - 1} images of a chat that has {len(asked)}")
        images = await self.reader.read(asked)
        return self._arranged(texts, [image.expansion for image in images], images)

    def places(self, ids: Sequence[int], images: Sequence[PreparedImage]) -> tuple[PlacedImage, ...]:
        """Where the images are in the tokens of their prompt. Raises ValidationError where tokens are missing."""
        found = [index for index, token in enumerate(ids) if token == self._token_id]
        if len(found) < sum(image.num_embeds for image in images):
            raise ValidationError("`truncate` would cut an image")
        if len(found) > sum(image.num_embeds for image in images):
            raise ValidationError(f"`inputs` contains {self.family.image_token}, which stands for an image")
        placed: list[PlacedImage] = []
        first = 0
        for image in images:
            start, last = found[first], found[first + image.num_embeds - 1]
            place = ImagePlace(image.key, start, last + 1 - start)
            placed.append(PlacedImage(image, place, is_indivisible=self.family.is_indivisible))
            first += image.num_embeds
        return tuple(placed)

    def _arranged(
        self, texts: Sequence[str], expansions: Sequence[str], images: tuple[PreparedImage, ...]
    ) -> ImagePrompt:
        parts = [texts[0]]
        for expansion, text in zip(expansions, texts[1:], strict=True):
            parts += [expansion, text]
        return ImagePrompt(self.family.arrange("".join(parts), self._bos), images)
