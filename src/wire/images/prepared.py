"""An image as the tower of a model reads it, and its place in a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from wire.processes.shared_memory import SharedBytes

FeatureType = Literal["float32", "bfloat16", "float16", "int64", "int32", "bool"]
ITEM_BYTES: Mapping[FeatureType, int] = {
    "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1,
}  # fmt: skip
KEY_BYTES = 32

Detail = Literal["auto", "high", "low"]
"""What a request asks of an image's size; `low`: it is reduced first."""


@dataclass(frozen=True, slots=True)
class Feature:
    """An array, as it travels: `data` holds it in row-major order, little-endian. `dtype` is torch's name.

    Not an array of numpy, which has no bfloat16. In memory that is shared where it is large and processes share any.
    """

    dtype: FeatureType
    shape: tuple[int, ...]
    data: bytes | SharedBytes = field(repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError for a type, a shape or a number of bytes that cannot be."""
        if self.dtype not in get_args(FeatureType):
            raise ValueError(f"an array of an image has the unknown type {str(self.dtype)[:50]!r}")
        num_bytes = ITEM_BYTES[self.dtype]
        for length in self.shape:
            if length < 1:
                raise ValueError(f"an array of an image has the shape {self.shape}")
            num_bytes *= length
        if num_bytes != len(self.data):
            raise ValueError(f"an array of an image has {len(self.data)} bytes where its shape needs {num_bytes}")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PreparedImage:
    """What the tower is given for one image, and what stands for it in the text.

    key: SHA-256 of the processor's settings, of what the request asked of it and of the file: equal keys mean equal
    images, counts and positions. expansion: the text that takes the place of the family's placeholder; empty on the
    side of the shard. num_embeds: rows that the tower makes, and image tokens in the expansion. grid: merged patches
    (frames, rows, columns), for families whose positions follow it. features: what the tower takes, by name; empty
    where the KV of all its tokens is known. num_pixels: of the picture, before it is prepared.
    """

    key: bytes
    expansion: str
    num_embeds: int
    grid: tuple[int, int, int] | None = None
    features: Mapping[str, Feature] = field(default_factory=dict)
    num_pixels: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, nearly."""
        return len(self.expansion) + sum(len(one.data) for one in self.features.values())


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """The tokens of a prompt from the first image token of an image through its last: `start` and their number.

    Tokens of the expansion before and behind those are outside: they may merge with text. Separators within the
    expansion are inside, so `length` may be more than the image's rows.
    """

    key: bytes
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


def places_of(
    ids: Sequence[int], image_token: int, token_text: str, images: Sequence[PreparedImage]
) -> list[ImagePlace]:
    """Where the images of a prompt are in its tokens, whose image tokens, `token_text`, are theirs in their order.

    Raises ValueError where image tokens are missing or too many.
    """
    found = [index for index, token in enumerate(ids) if token == image_token]
    wanted = sum(image.num_embeds for image in images)
    if len(found) < wanted:
        raise ValueError("`truncate` would cut an image")
    if len(found) > wanted:
        raise ValueError(f"`inputs` contains {token_text}, which stands for an image")
    places: list[ImagePlace] = []
    first = 0
    for image in images:
        start, last = found[first], found[first + image.num_embeds - 1]
        places.append(ImagePlace(image.key, start, last + 1 - start))
        first += image.num_embeds
    return places
