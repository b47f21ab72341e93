"""What the router and the process that prepares images send each other: a header in JSON, then bytes as they are."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import orjson

from wire.images.prepared import Detail, Feature, PreparedImage

_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Job:
    """A file to prepare. With an empty `data` only the process is asked whether it can."""

    key: bytes
    data: bytes
    max_pixels: int
    detail: Detail = "auto"


def job_to(job: Job) -> bytes:
    return _joined({"key": job.key.hex(), "max_pixels": job.max_pixels, "detail": job.detail}, job.data)


def job_from(asked: bytes) -> Job:
    header, data = _parted(asked)
    return Job(bytes.fromhex(header["key"]), bytes(data), header["max_pixels"], header["detail"])


def fault_to(fault: str) -> bytes:
    """Why there is no image; an empty text if nothing was asked for and all is well."""
    return _joined({"fault": fault})


def image_to(image: PreparedImage) -> bytes:
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
    }
    return _joined(header, *(one.data for one in image.features.values()))


def answer_from(answer: bytes) -> PreparedImage | str:
    """The image, or the fault."""
    header, data = _parted(answer)
    if "fault" in header:
        return str(header["fault"])
    features: dict[str, Feature] = {}
    place = 0
    for one in header["features"]:
        end = place + one["bytes"]
        features[one["name"]] = Feature(one["dtype"], tuple(one["shape"]), bytes(data[place:end]))
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
