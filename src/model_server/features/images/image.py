"""An image as prepared by the router, and its place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from model_server.errors import RequestError
from model_server.features.images.families import VisionFamily
from wire.processes.shared_memory import SharedBytes

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "int64", "int32", "bool")
}
"""Types of features by their names."""

# Of a key: SHA-256.
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class LostBytes:
    """Shared memory that this rank could not open."""

    length: int

    def __len__(self) -> int:
        return self.length

    def read(self) -> bytearray:
        """Raises OSError."""
        raise FileNotFoundError("the shared memory could not be opened")


@dataclass(frozen=True, slots=True)
class Feature:
    """A little-endian array in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | SharedBytes | LostBytes

    def check(self, name: str) -> None:
        """Refuse unknown types and misfitting lengths."""
        dtype = DTYPES.get(self.dtype)
        if dtype is None:
            raise RequestError(f"image feature {name}: type {self.dtype[:20]!r} is not one of {', '.join(DTYPES)}")
        expected = math.prod(self.shape) * dtype.itemsize
        if expected == 0 or len(self.data) != expected:
            raise RequestError(
                f"image feature {name}: {len(self.data)} bytes for shape {list(self.shape)} in {self.dtype}"
            )

    def tensor(self) -> Tensor:
        """Copy to the host.

        Raises:
            OSError: Shared memory is short or absent.
        """
        data = bytearray(self.data) if isinstance(self.data, bytes) else self.data.read()
        return torch.frombuffer(data, dtype=DTYPES[self.dtype]).view(self.shape)


@dataclass(frozen=True, slots=True)
class Image:
    """One image for its tower."""

    # Equal keys mean equal images.
    key: bytes
    # The tower's arguments.
    features: Mapping[str, Feature]
    # Rows that the tower makes.
    num_embeds: int
    # Merged patches (time, height, width) of positions.
    grid: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """`length` tokens from `start` that stand for an image, None if their KV is cached."""

    key: bytes
    start: int
    length: int
    image: Image | None

    @property
    def stop(self) -> int:
        """Behind its last token."""
        return self.start + self.length


@dataclass(frozen=True)
class AskedImages:
    """The images of a request, in order."""

    refusal: ClassVar = "this model takes text only, not images"

    places: tuple[ImagePlace, ...]


@dataclass(frozen=True, slots=True)
class EncodedImages:
    """Images of a step's prompts: hits, and misses encoded in `encode_ns`."""

    hits: int = 0
    misses: int = 0
    encode_ns: int = 0


class Encoded:
    """What a tower made of an image."""

    __slots__ = ("__weakref__", "deep", "num_tiles", "rows")

    def __init__(self, rows: Tensor, deep: Tensor | None = None, *, num_tiles: int = 1) -> None:
        # [num_embeds, hidden] for the first layer, or [n, hidden] for cross attention.
        self.rows = rows
        # [layers, num_embeds, hidden], added behind the first layers, if any.
        self.deep = deep
        # That show the image; others pad.
        self.num_tiles = num_tiles


class SeesImages(Protocol):
    """What makes embeddings of images, in `torch.inference_mode`."""

    @property
    def family(self) -> VisionFamily: ...

    @property
    def image_token(self) -> int:
        """Return the id that embeddings replace."""

    @property
    def row_bytes(self) -> int: ...

    def encode(self, image: Image) -> Encoded:
        """Encode an image into as many rows as it says."""
