"""A connection with bounded reading, whatever the server sends."""

from __future__ import annotations

import ssl

import httpcore2

HEAD_BYTES = 64 * 1024
_READ_BYTES = 4096
"""Until the file begins. What is read at once is parsed without a pause, and may be a hundred interim answers."""


class TooLongError(Exception):
    """The server has sent too much."""


class BoundedStream(httpcore2.AsyncNetworkStream):
    """Reads HEAD_BYTES, and what is allowed later."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream) -> None:
        self._stream = stream
        self._left = HEAD_BYTES
        self._most = _READ_BYTES

    def allow(self, num_bytes: int) -> None:
        self._left += num_bytes
        self._most = self._left

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        """Raises TooLongError."""
        data = await self._stream.read(min(max_bytes, self._most), timeout)
        self._left -= len(data)
        if self._left < 0:
            raise TooLongError
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> BoundedStream:
        return BoundedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> object:
        return self._stream.get_extra_info(info)
