"""The frames between the router and a worker process: 4 bytes of length, big-endian, then the data."""

from __future__ import annotations

from collections.abc import Callable

LENGTH_BYTES = 4


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def read_frame(read_exactly: Callable[[int], bytes]) -> bytes:
    """The data of the next frame. `read_exactly(n)` returns n bytes or raises, as this function then does."""
    return read_exactly(int.from_bytes(read_exactly(LENGTH_BYTES), "big"))
