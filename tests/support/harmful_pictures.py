"""Files that were built to do harm, or are rare; and random ones, a third of them harmful."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin
from support.pictures import picture, pixels, saved

_FIFTY_MB = 50_000_000
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "TIFF")
_MODES = ("1", "L", "LA", "P", "RGBA", "CMYK", "I;16")


def chunk(name: bytes, data: bytes) -> bytes:
    """Of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of(width: int, height: int, *chunks: bytes) -> bytes:
    """A PNG by its header, with what follows it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND", b"")


def _with_chunk(name: bytes, before: bytes) -> bytes:
    """A small picture with a compressed chunk that unpacks to 50 MB."""
    plain = picture(30, 40)
    return plain[:33] + chunk(name, before + zlib.compress(bytes(_FIFTY_MB), 9)) + plain[33:]


def _many_frames(number: int = 100_000) -> bytes:
    file = saved(Image.fromarray(pixels(8, 8)).convert("P"), "GIF")
    begin = file.index(b",", 13 + 3 * 2 ** ((file[10] & 7) + 1))
    return file[:begin] + file[begin:-1] * number + b";"


def _many_directories(number: int = 100_000) -> bytes:
    """A TIFF whose directories follow each other, each empty."""
    whole = saved(Image.fromarray(pixels(8, 8)), "TIFF")
    first = struct.unpack_from("<I", whole, 4)[0]
    entries = struct.unpack_from("<H", whole, first)[0]
    data = bytearray(whole)
    struct.pack_into("<I", data, first + 2 + 12 * entries, len(data))
    for _ in range(number):
        data += struct.pack("<HI", 0, len(data) + 6)
    return bytes(data)


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.png", picture(8, 8))
    return file.getvalue()


def _large() -> bytes:
    """49 megapixels in some kilobytes."""
    line = zlib.compress(bytes(7000 * 3 + 1) * 7000, 9)
    return png_of(7000, 7000, chunk(b"IDAT", line))


def _text_chunks() -> bytes:
    """Each below the limit of a chunk, 70 MB together."""
    info = PngImagePlugin.PngInfo()
    for number in range(80):
        info.add_text(f"k{number}", "x" * 900_000, zip=True)
    return saved(Image.fromarray(pixels(8, 8)), pnginfo=info)


def many_scans(side: int = 500, number: int = 5000) -> bytes:
    """A JPEG whose last scan comes again and again: in 60 KB as much work as some hundred pictures of this size."""
    file = saved(Image.new("L", (side, side), 128), "JPEG", progressive=True)
    last = file.rindex(b"\xff\xda")
    return file[:-2] + file[last:-2] * number + file[-2:]


HARMFUL: Mapping[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "svg": lambda: b"<svg xmlns='http://www.w3.org/2000/svg' onload='x'/>",
    "postscript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "html": lambda: b"<!doctype html><script>",
    "psd": lambda: b"8BPS\x00\x01" + bytes(40),
    "zip": _zip,
    "bmp": lambda: saved(Image.fromarray(pixels(8, 8)), "BMP"),
    "zeros": lambda: bytes(1000),
    "a header of 10^10 pixels": lambda: png_of(10**5, 10**5),
    "no pixels": lambda: png_of(0, 5),
    "a header alone": lambda: png_of(40, 40),
    "a truncated jpeg": lambda: picture(64, 64, format="JPEG")[:400],
    "a truncated webp": lambda: picture(64, 64, format="WEBP")[:100],
    "text that unpacks to 50 MB": lambda: _with_chunk(b"zTXt", b"Comment\x00\x00"),
    "many texts": _text_chunks,
    "many scans": many_scans,
}
"""None of these is a picture that can be read."""

RARE: Mapping[str, Callable[[], bytes]] = {
    "a profile that unpacks to 50 MB": lambda: _with_chunk(b"iCCP", b"icc\x00\x00"),
    "a jpeg with a profile of 9 MB": lambda: picture(30, 40, format="JPEG", icc_profile=bytes(9_000_000)),
    "10^5 frames": _many_frames,
    "10^5 directories": _many_directories,
    "49 megapixels": _large,
    "one pixel": lambda: picture(1, 1),
    "three pixels": lambda: picture(3, 3),
    "a line": lambda: picture(1, 4000),
    "a column": lambda: picture(4000, 12),
}
"""Pictures that can be read, if they are not refused for their form; within the limits either way."""


def mode_picture(mode: str, seed: int = 0) -> bytes:
    """A TIFF of 8x8 pixels that are kept as `mode`."""
    values: Any = pixels(8, 8, seed)
    if mode == "I;16":
        return saved(Image.fromarray(values[..., 0].astype(np.uint16) * 257), "TIFF")
    return saved(Image.fromarray(values).convert(mode), "TIFF")


def turned_picture(orientation: int, seed: int = 0) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return picture(8, 16, seed, exif=exif)


def random_picture(source: random.Random) -> tuple[str, bytes]:
    """A file, and of which kind it is: `sound`, `rare` or `harmful`. Large ones come seldom: they take seconds."""
    kind = source.random()
    seed = source.randrange(1000)
    if kind < 0.6:
        height, width = source.randrange(4, 90), source.randrange(4, 90)
        return "sound", picture(height, width, seed, format=source.choice(FORMATS))
    if kind < 0.66:
        if source.random() < 0.5:
            return "sound", mode_picture(source.choice(_MODES), seed)
        return "sound", turned_picture(source.randrange(1, 9), seed)
    if kind < 0.68:
        name = source.choice([name for name in RARE if name != "49 megapixels" or source.random() < 0.2])
        return "rare", _kept(RARE, name)
    if kind < 0.82:
        return "harmful", _kept(HARMFUL, source.choice(list(HARMFUL)))
    whole = bytearray(picture(source.randrange(4, 90), source.randrange(4, 90), seed, format=source.choice(FORMATS)))
    if source.random() < 0.5:
        return "rare", bytes(whole[: source.randrange(len(whole))])
    for _ in range(source.randrange(1, 20)):
        whole[source.randrange(len(whole))] = source.randrange(256)
    return "rare", bytes(whole)


_files: dict[str, bytes] = {}


def _kept(files: Mapping[str, Callable[[], bytes]], name: str) -> bytes:
    if name not in _files:
        _files[name] = files[name]()
    return _files[name]
