"""The GGUF header, checked before mapping: lengths and counts are compared with the file's rest, so that claims
allocate no more.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from model_server.errors import StartupError
from model_server.weights.header import Stored
from wire.model_files import open_regular

# Numbers and bytes of one block of a row, by the name of the type. Of the floating-point types a block is one number.
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "IQ3_S": (256, 110), "IQ3_XXS": (256, 98),
    "IQ2_S": (256, 82), "IQ2_XS": (256, 74), "IQ2_XXS": (256, 66), "IQ1_S": (256, 50), "IQ1_M": (256, 56),
    "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17),
}  # fmt: skip
FLOATS = ("F32", "F16", "BF16")

_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_UNSERVED = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
_MOST_TENSORS, _MOST_VALUES, _MOST_ITEMS = 2**17, 2**16, 2**22
_MOST_NAME_BYTES = 2**16
_MOST_HEADER_BYTES = 256 * 2**20
_MOST_SIZE = 2**40
_LARGEST_ALIGNMENT = 2**16
# Types of metadata: numbers by their format for `struct`.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by key, and tensors [out, in] with offsets from the start."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Stored]


class _Fault(Exception):
    """What is wrong, in a few words."""


class _Unserved(Exception):
    """What is whole, but not served."""


def read_gguf(path: Path) -> GgufHeader:
    """Read the header of GGUF version 2 or 3.

    Raises:
        StartupError: One line on damage, a version, or an unserved type.
    """
    try:
        with open_regular(path, StartupError) as file:
            return _Parser(file, os.fstat(file.fileno()).st_size).parse()
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except _Unserved as refusal:
        raise StartupError(f"{path} {refusal}") from None
    except _Fault as fault:
        raise StartupError(f"{path} is damaged or incomplete: {fault}") from None


class _Parser:
    """Reads `file`, of `size` bytes, in order."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._limit = min(size, _MOST_HEADER_BYTES)
        self._at = 0

    def parse(self) -> GgufHeader:
        num_tensors, num_values = self._counts()
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._text(_MOST_NAME_BYTES)
            if key in metadata:
                raise _Fault(f"the metadata names {key!r:.200} twice")
            metadata[key] = self._value(self._number("I"))
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _LARGEST_ALIGNMENT or alignment % 8:
            raise _Fault(f"the alignment is {alignment!r:.40}")
        start = -(-self._at // alignment) * alignment
        return GgufHeader(metadata, self._tensors(entries, start, alignment))

    def _counts(self) -> tuple[int, int]:
        if self._bytes(4) != _MAGIC:
            raise _Unserved("is not a GGUF file")
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            raise _Unserved(
                "is big-endian, which is not served" if swapped else f"is of GGUF version {version}; 2 and 3 are served"
            )
        num_tensors, num_values = self._number("Q"), self._number("Q")
        if num_tensors > _MOST_TENSORS or num_values > _MOST_VALUES:
            raise _Fault(f"the header claims {num_tensors} tensors and {num_values} values")
        return num_tensors, num_values

    def _bytes(self, count: int) -> bytes:
        if count > self._limit - self._at:
            raise _Fault(
                f"the header claims {count} bytes at {self._at}, where {max(self._limit - self._at, 0)} are left"
            )
        found = self._file.read(count)
        if len(found) < count:
            raise _Fault("the file has become shorter")
        self._at += count
        return found

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._bytes(struct.calcsize("<" + code)))[0]

    def _text(self, most: int = _MOST_HEADER_BYTES) -> str:
        length = self._number("Q")
        if length > most:
            raise _Fault(f"the header claims a name of {length} bytes")
        return self._bytes(length).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise _Fault(f"metadata of the unknown type {kind}")
        inner, count = self._number("I"), self._number("Q")
        if count > _MOST_ITEMS:
            raise _Fault(f"the header claims an array of {count} values")
        if inner == _STRING:
            return [self._text() for _ in range(count)]
        if inner not in _NUMBERS:
            raise _Fault(f"an array of the unknown type {inner}")
        code = _NUMBERS[inner]
        return list(struct.unpack(f"<{count}{code}", self._bytes(count * struct.calcsize("<" + code))))

    def _entry(self) -> tuple[str, str, tuple[int, ...], int]:
        """Return name, type, shape, and offset from the tensors' start."""
        name, dimensions = self._text(_MOST_NAME_BYTES), self._number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise _Fault(f"tensor {name!r:.200} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        number = self._number("I")
        offset: int = self._number("Q")
        if any(not 0 < size <= _MOST_SIZE for size in shape) or not shape:
            raise _Fault(f"tensor {name!r:.200} has the impossible shape {list(shape)}")
        if number not in _TYPES:
            known = _UNSERVED.get(number, f"type {number}")
            raise _Unserved(f"stores {name} as {known}, which is not served; served are {', '.join(BLOCKS)}")
        return name, _TYPES[number], shape, offset

    def _tensors(
        self, entries: list[tuple[str, str, tuple[int, ...], int]], start: int, alignment: int
    ) -> dict[str, Stored]:
        found: dict[str, Stored] = {}
        for name, dtype, shape, offset in entries:
            length, size = BLOCKS[dtype]
            if name in found:
                raise _Fault(f"the header names tensor {name!r:.200} twice")
            if shape[-1] % length:
                raise _Fault(f"tensor {name!r:.200} has rows of {shape[-1]} numbers in blocks of {length}")
            if offset % alignment:
                raise _Fault(f"tensor {name!r:.200} is not aligned to {alignment} bytes")
            begin = start + offset
            end = begin + math.prod(shape) // length * size
            if end > self._size:
                raise _Fault(f"tensor {name!r:.200} ends at byte {end} of {self._size}")
            found[name] = Stored(dtype, shape, begin, end)
        self._check_overlap(found)
        return found

    @staticmethod
    def _check_overlap(tensors: Mapping[str, Stored]) -> None:
        position = 0
        for name, stored in sorted(tensors.items(), key=lambda item: item[1].begin):
            if stored.begin < position:
                raise _Fault(f"tensor {name!r:.200} overlaps another")
            position = stored.end
