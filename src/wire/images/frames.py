"""Frames of router and image processes: a JSON header, then bytes, large ones in shared memory."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import orjson

from wire.images.prepared import Detail, Feature, PreparedImage
from wire.processes.shared_memory import SharedBytes, SharedMemory

_LENGTH = struct.Struct(">I")

SHARED_FROM = 1 << 19
"""Bytes of an image's arrays from which they pass in shared memory: each such image is an open file."""


@dataclass(frozen=True, slots=True)
class Job:
    """A file to prepare; with empty `data` only whether it can be."""

    key: bytes
    data: bytes
    max_pixels: int
    detail: Detail = "auto"
    # Shared memory for the result; empty: none.
    memory: str = ""


def job_to(job: Job) -> bytes:
    header = {"key": job.key.hex(), "max_pixels": job.max_pixels, "detail": job.detail, "memory": job.memory}
    return _joined(header, job.data)


def job_from(asked: bytes) -> Job:
    header, data = _parted(asked)
    return Job(bytes.fromhex(header["key"]), bytes(data), header["max_pixels"], header["detail"], header["memory"])


def fault_to(fault: str) -> bytes:
    """Why there is no image; an empty text if nothing was asked for and all is well."""
    return _joined({"fault": fault})


def image_to(image: PreparedImage, memory: str = "") -> bytes:
    """Frame an image, with arrays in `memory` if it opens."""
    arrays = [one.data for one in image.features.values() if isinstance(one.data, bytes)]
    shared = _opened(memory) if memory and sum(map(len, arrays)) >= SHARED_FROM else None
    features = [
        {"name": name, "dtype": one.dtype, "shape": one.shape, "bytes": len(one.data)}
        for name, one in image.features.items()
    ]
    header = {
        "key": image.key.hex(),
        "expansion": image.expansion,
        "num_embeds": image.num_embeds,
        "grid": image.grid,
        "num_pixels": image.num_pixels,
        "features": features,
        "is_shared": shared is not None,
    }
    if shared is None:
        return _joined(header, *arrays)
    place = 0
    for one in arrays:
        shared.write(place, one)
        place += len(one)
    return _joined(header)


def _opened(memory: str) -> SharedMemory | None:
    """Open shared memory, unless a sandbox forbids it."""
    try:
        return SharedMemory.open(memory)
    except OSError:
        return None


def answer_from(answer: bytes, memory: SharedMemory | None = None) -> PreparedImage | str:
    """The image, or the fault. memory: what the job named."""
    header, data = _parted(answer)
    if "fault" in header:
        return str(header["fault"])
    features: dict[str, Feature] = {}
    place = 0
    for one in header["features"]:
        end = place + one["bytes"]
        array: bytes | SharedBytes
        if header["is_shared"]:
            assert memory is not None
            array = SharedBytes(memory, place, one["bytes"])
        else:
            array = bytes(data[place:end])
        features[one["name"]] = Feature(one["dtype"], tuple(one["shape"]), array)
        place = end
    grid = header["grid"]
    return PreparedImage(
        key=bytes.fromhex(header["key"]),
        expansion=header["expansion"],
        num_embeds=header["num_embeds"],
        grid=None if grid is None else tuple(grid),
        features=features,
        num_pixels=header["num_pixels"],
    )


def _joined(header: dict[str, Any], *parts: bytes) -> bytes:
    text = orjson.dumps(header)
    return b"".join((_LENGTH.pack(len(text)), text, *parts))


def _parted(data: bytes) -> tuple[dict[str, Any], memoryview]:
    (length,) = _LENGTH.unpack_from(data)
    begin = _LENGTH.size + length
    header: dict[str, Any] = orjson.loads(data[_LENGTH.size : begin])
    return header, memoryview(data)[begin:]
