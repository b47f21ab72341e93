"""Frames of router and workers: 4 bytes of length, big-endian, data; questions begin with a limit in seconds, empty
answers are late.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

LENGTH_BYTES = 4
LATE = b""
_LIMIT = struct.Struct(">d")


def frame(data: bytes) -> bytes:
    # Joined, not added: other threads run while megabytes are copied.
    return b"".join((len(data).to_bytes(LENGTH_BYTES, "big"), data))


def read_frame(read_exactly: Callable[[int], bytes]) -> bytes:
    """The data of the next frame. `read_exactly(n)` returns n bytes or raises, as this function then does."""
    return read_exactly(int.from_bytes(read_exactly(LENGTH_BYTES), "big"))


def with_limit(limit_s: float, data: bytes) -> bytes:
    """What is asked."""
    return b"".join((_LIMIT.pack(limit_s), data))


def limit_and_data(asked: bytes) -> tuple[float, bytes]:
    """The limit in seconds and the rest of what is asked."""
    (limit_s,) = _LIMIT.unpack_from(asked)
    return limit_s, asked[_LIMIT.size :]
