"""The safetensors header, checked before mapping: lengths, places and sizes must fit the file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from model_server.errors import StartupError
from wire.model_files import most_stored, open_regular

# The largest public files have headers of about 15 MB (100 000 tensors); the format itself allows 100 MB.
MAX_HEADER_BYTES = 32 * 2**20
MAX_DIMENSIONS = 16

_LENGTH_BYTES = 8
_METADATA = "__metadata__"

# Bits of one number, by the format's name of the type.
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor; offsets from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """A file's tensors by name; equal by identity."""

    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str] = field(default_factory=dict)


class _Fault(Exception):
    """What is wrong, in a few words."""


def parse(text: bytes, data_start: int, size: int) -> Header:
    """Check `text` of a file of `size` bytes, whose tensors begin at `data_start`."""
    try:
        fields = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _Fault(f"the header is not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise _Fault("the header is not a JSON object")
    metadata = fields.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _Fault("the metadata values are not strings")
    tensors = {name: _stored(name, entry, data_start) for name, entry in fields.items()}
    _check_layout(tensors, data_start, size)
    return Header(tensors, metadata)


def read_header(path: Path, parse: Callable[[bytes, int, int], Header] = parse) -> Header:
    """Read and check a header.

    Args:
        parse: May remember results.

    Raises:
        StartupError: One line: irregular file, lengths, JSON, types, sizes, overlaps or holes.
    """
    try:
        with open_regular(path, StartupError) as file:
            size = os.fstat(file.fileno()).st_size
            text = _header_text(file, size)
        return parse(text, _LENGTH_BYTES + len(text), size)
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except _Fault as fault:
        raise StartupError(f"{path} is damaged or incomplete: {fault}") from None


def stored_type(tensors: Iterable[Stored]) -> str | None:
    """Return the type of most floating-point bytes; GGUF blocks count as 16 bits."""
    return most_stored(
        (tensor.dtype if tensor.dtype in BITS else "F16", tensor.end - tensor.begin) for tensor in tensors
    )


def read_headers(files: Iterable[Path], parse: Callable[[bytes, int, int], Header] = parse) -> dict[Path, Header]:
    """Read several headers in order.

    Raises:
        StartupError: A file is damaged or cannot be read.
    """
    return {file: read_header(file, parse) for file in files}


def _header_text(file: BinaryIO, size: int) -> bytes:
    length_bytes = file.read(_LENGTH_BYTES)
    if len(length_bytes) < _LENGTH_BYTES:
        raise _Fault(f"a file of {size} bytes has no header")
    length = int.from_bytes(length_bytes, "little")
    if length > size - _LENGTH_BYTES:
        raise _Fault(f"the header claims {length} bytes, the file has {size}")
    if length > MAX_HEADER_BYTES:
        raise _Fault(f"the header claims {length} bytes, more than {MAX_HEADER_BYTES // 2**20} MiB")
    return file.read(length)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Fault(f"the header names {next(n for n in names if names.count(n) > 1)!r:.200} twice")
    return found


def _refuse_constant(word: str) -> NoReturn:
    raise _Fault(f"the header holds {word}")


def _stored(name: str, entry: Any, data_start: int) -> Stored:
    if not isinstance(entry, dict):
        raise _Fault(f"the header describes tensor {name!r:.200} by something that is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _Fault(f"tensor {name!r:.200} has the unknown type {dtype!r:.40}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not _are_sizes(shape):
        raise _Fault(f"tensor {name!r:.200} has the impossible shape {shape!r:.80}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_sizes(offsets) or offsets[0] > offsets[1]:
        raise _Fault(f"tensor {name!r:.200} has the impossible offsets {offsets!r:.80}")
    begin, end = offsets
    bits = math.prod(shape) * BITS[dtype]
    if bits != 8 * (end - begin):
        raise _Fault(f"tensor {name!r:.200} of shape {shape!r:.80} and type {dtype} does not take {end - begin} bytes")
    return Stored(dtype, tuple(shape), data_start + begin, data_start + end)


def _are_sizes(values: Iterable[Any]) -> bool:
    """Whether all are possible whole numbers; `True` and `1.0` are not."""
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_layout(tensors: Mapping[str, Stored], data_start: int, size: int) -> None:
    """Check that tensors follow each other to the end."""
    position = data_start
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if stored.begin != position:
            fault = "overlaps another" if stored.begin < position else "is after a hole"
            raise _Fault(f"tensor {name!r:.200} {fault}")
        position = stored.end
    if position != size:
        what = "cut short" if position > size else "longer than its tensors"
        raise _Fault(f"the file is {what}: {size} bytes instead of {position}")
