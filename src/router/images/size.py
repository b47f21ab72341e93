"""How many pixels a file claims."""

from __future__ import annotations

import struct

_PNG = b"\x89PNG\r\n\x1a\n"
_NO_FRAME = (0xC4, 0xC8, 0xCC)
"""Markers of JPEG beside those of its frames: tables, and one that is reserved."""
_MOST_SEGMENTS = 256


def pixels_of(data: bytes) -> int | None:
    """Read the header's pixels of PNG, JPEG, GIF and WebP, if found."""
    try:
        if data.startswith(_PNG):
            width, height = struct.unpack_from(">II", data, 16)
        elif data.startswith((b"GIF87a", b"GIF89a")):
            width, height = struct.unpack_from("<HH", data, 6)
        elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            width, height = _webp(data)
        elif data.startswith(b"\xff\xd8"):
            width, height = _jpeg(data)
        else:
            return None
    except (struct.error, ValueError):
        return None
    return int(width) * int(height)


def _webp(data: bytes) -> tuple[int, int]:
    """Raises struct.error and ValueError."""
    kind = data[12:16]
    if kind == b"VP8X":
        low, middle, high, *rest = struct.unpack_from("<6B", data, 24)
        return 1 + (low | middle << 8 | high << 16), 1 + (rest[0] | rest[1] << 8 | rest[2] << 16)
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ValueError


def _jpeg(data: bytes) -> tuple[int, int]:
    """Return the first frame's size."""
    place = 2
    for _ in range(_MOST_SEGMENTS):
        mark, marker, length = struct.unpack_from(">BBH", data, place)
        if mark != 0xFF:
            break
        if 0xC0 <= marker <= 0xCF and marker not in _NO_FRAME:
            height, width = struct.unpack_from(">HH", data, place + 5)
            return width, height
        place += 1 if marker == 0xFF else 2 + length
    raise ValueError
