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
    """An array as it travels: row-major, little-endian, torch's `dtype`, perhaps in shared memory; numpy lacks
    bfloat16.
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
    """The tower's inputs for one image, and its text."""

    # SHA-256 of settings, request and file: equal keys mean equal images.
    key: bytes
    # Replaces the placeholder; empty on the shard.
    expansion: str
    # The tower's rows, and image tokens.
    num_embeds: int
    # Merged patches (frames, rows, columns), where positions follow.
    grid: tuple[int, int, int] | None = None
    # Inputs by name; empty where all KV is known.
    features: Mapping[str, Feature] = field(default_factory=dict)
    # Before preparing.
    num_pixels: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, nearly."""
        return len(self.expansion) + sum(len(one.data) for one in self.features.values())


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """`length` tokens from `start`, from an image's first through last token, separators included."""

    key: bytes
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


def places_of(
    ids: Sequence[int], image_token: int, token_text: str, images: Sequence[PreparedImage]
) -> list[ImagePlace]:
    """Find the images' places in a prompt's ids.

    Raises:
        ValueError: Image tokens are missing or too many.
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
