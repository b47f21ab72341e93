"""An image as the router has prepared it, and its place in a prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_server.errors import RequestError
from model_server.vision.families import VisionFamily
from wire.processes.shared_memory import SharedBytes

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "int64", "int32", "bool")
}
"""Types of features by their names."""

# Of a key: SHA-256.
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class LostBytes:
    """A part of shared memory that this rank could not open."""

    length: int

    def __len__(self) -> int:
        return self.length

    def read(self) -> bytearray:
        """Raises OSError."""
        raise FileNotFoundError("the shared memory could not be opened")


@dataclass(frozen=True, slots=True)
class Feature:
    """An array in row-major order, little-endian. dtype: one of `DTYPES`, or a name that is refused."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | SharedBytes | LostBytes

    def check(self, name: str) -> None:
        """Raises RequestError for a type that is not known, or data of another length than the shape's."""
        dtype = DTYPES.get(self.dtype)
        if dtype is None:
            raise RequestError(f"image feature {name}: type {self.dtype[:20]!r} is not one of {', '.join(DTYPES)}")
        expected = math.prod(self.shape) * dtype.itemsize
        if expected == 0 or len(self.data) != expected:
            raise RequestError(
                f"image feature {name}: {len(self.data)} bytes for shape {list(self.shape)} in {self.dtype}"
            )

    def tensor(self) -> Tensor:
        """A copy on the host. Raises OSError for shared memory that is shorter than was said, or not there."""
        data = bytearray(self.data) if isinstance(self.data, bytes) else self.data.read()
        return torch.frombuffer(data, dtype=DTYPES[self.dtype]).view(self.shape)


@dataclass(frozen=True, slots=True)
class Image:
    """One image, as its tower reads it.

    key: equal keys mean equal images, sizes and positions. features: arguments of the tower, by name. grid: merged
    patches (time, height, width), where positions follow them. num_embeds: rows that the tower makes of it.
    """

    key: bytes
    features: Mapping[str, Feature]
    num_embeds: int
    grid: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """The tokens from `start` stand for an image, `length` of them, some perhaps around and between its image tokens.

    image: None: it was not sent, because the KV of all of these tokens is in the cache.
    """

    key: bytes
    start: int
    length: int
    image: Image | None

    @property
    def stop(self) -> int:
        """Behind its last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class EncodedImages:
    """The images that the prompts of a step needed: hits were encoded before, misses in `encode_ns` for this step."""

    hits: int = 0
    misses: int = 0
    encode_ns: int = 0


class Encoded:
    """What a tower has made of an image. rows: [num_embeds, hidden], as the first layer reads them; [n, hidden] where
    layers of cross attention read them. deep: [layers, num_embeds, hidden], what is added to them behind the first
    layers; None: nothing. num_tiles: of those that rows are divided into, how many show the image; the others pad."""

    __slots__ = ("__weakref__", "deep", "num_tiles", "rows")

    def __init__(self, rows: Tensor, deep: Tensor | None = None, *, num_tiles: int = 1) -> None:
        self.rows = rows
        self.deep = deep
        self.num_tiles = num_tiles


class SeesImages(Protocol):
    """What makes embeddings of images, in `torch.inference_mode`."""

    @property
    def family(self) -> VisionFamily: ...

    @property
    def image_token(self) -> int:
        """Id of the tokens that embeddings are laid over."""

    @property
    def row_bytes(self) -> int:
        """Of what is kept for an image token."""

    def encode(self, image: Image) -> Encoded:
        """Raises whatever the tower raises for features that it cannot read, RequestError for another number of rows
        than the image's."""
