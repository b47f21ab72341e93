"""Images that come as files between the texts of a prompt, as TGI's router sends them, prepared in a process apart.

Our router prepares images itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from model_server.errors import RequestError
from model_server.text.tokenizer import Tokenizer
from model_server.vision.image import Feature, Image, ImagePlace
from wire.images import frames
from wire.images.families import ImageFamily
from wire.images.prepared import PreparedImage, places_of
from wire.worker.frames import with_limit
from wire.worker.process import WorkerProcess

_MODULE = "wire.images.worker"
_LIMIT_S = 10.0  # for one image
_GRACE_S = 5.0
_MAX_PIXELS = 50_000_000


class ImageFiles:
    """Makes tokens and places of prompts with files, for one model. For one thread, except for `close`; its process
    starts with the first image."""

    def __init__(
        self, directory: Path, dtype: torch.dtype, family: ImageFamily, image_token: int, tokenizer: Tokenizer
    ) -> None:
        self._process = WorkerProcess(_MODULE, (str(directory), str(dtype).removeprefix("torch.")))
        self._family = family
        self._image_token = image_token
        self._tokenizer = tokenizer

    def read(
        self, chunks: Sequence[str | bytes], *, truncate: int, add_special_tokens: bool
    ) -> tuple[list[int], tuple[ImagePlace, ...]]:
        """Tokens of a prompt, and where its images are in them. chunks: texts, and files of images.

        Raises RequestError for a file that is not an image, and for tokens that do not fit the images.
        """
        family = self._family
        before, _, behind = family.marker.partition(family.placeholder)
        images: list[PreparedImage] = []
        parts: list[str] = []
        for chunk in chunks:
            if isinstance(chunk, str):
                parts.append(chunk)
                continue
            images.append(self._prepared(chunk))
            parts += [before, images[-1].expansion, behind]
        text = family.arrange("".join(parts), self._tokenizer.bos_token)
        adds = add_special_tokens and family.adds_special_tokens
        ids = self._tokenizer.encode(text, truncate=truncate, add_special_tokens=adds)
        try:
            places = places_of(ids, self._image_token, family.image_token, images)
        except ValueError as error:
            raise RequestError(str(error)) from None
        placed = zip(places, images, strict=True)
        return ids, tuple([ImagePlace(p.key, p.start, p.length, _image_of(image)) for p, image in placed])

    def close(self) -> None:
        """Ends the process, whatever it does: a `read` that waits for it fails, as later ones do."""
        self._process.kill()

    def _prepared(self, data: bytes) -> PreparedImage:
        if not data:
            raise RequestError("invalid image: the file is empty")
        asked = frames.job_to(frames.Job(hashlib.sha256(data).digest(), data, _MAX_PIXELS))
        try:
            answer = self._process.exchange(with_limit(_LIMIT_S, asked), _LIMIT_S + _GRACE_S)
        except OSError:
            answer = b""
        if not answer:
            raise RequestError("invalid image: it takes too much memory or time to decode")
        image = frames.answer_from(answer)
        if isinstance(image, str):
            raise RequestError(f"invalid image: {image}")
        return image


def _image_of(image: PreparedImage) -> Image:
    features = {name: Feature(one.dtype, one.shape, one.data) for name, one in image.features.items()}
    return Image(image.key, features, image.num_embeds, image.grid or ())
