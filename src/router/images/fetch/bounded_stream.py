"""A connection with bounded reading, whatever the server sends, and below TLS as well: its records may hold nothing."""

from __future__ import annotations

import asyncio
import ssl

import httpcore2

HEAD_BYTES = 64 * 1024
_READ_BYTES = 4096
"""Until the file begins. What is read at once is parsed without a pause, and may be a hundred interim answers."""
_TINY_BYTES = 256
_MOST_TINY_READS = 512
_RECORDS_BYTES = 64 * 1024
# Without finite fields, whose size the server chooses: one exchange with 10,000 bits takes more than a second.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20:ECDHE+AES"


class BoundError(Exception):
    """The server has sent too much, or too little at a time; takes the reason."""


class BoundedStream(httpcore2.AsyncNetworkStream):
    """Reads HEAD_BYTES, and what is allowed later, in reads of some length."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream, below: BoundedStream | None = None) -> None:
        """Take the stream, and what carries it if that is bounded, too."""
        self._stream = stream
        self._below = below
        self._left = HEAD_BYTES
        self._most = _READ_BYTES
        self._reads_left: float = _MOST_TINY_READS

    def allow(self, num_bytes: int) -> None:
        self._left += num_bytes
        self._most = self._left
        if self._below is not None:
            self._below.allow(num_bytes + num_bytes // 8)  # records have a head and an end

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        """Raises BoundError."""
        data = await self._stream.read(min(max_bytes, self._most), timeout)
        self._left -= len(data)
        if self._left < 0:
            raise BoundError("the server sends too much besides the file")
        self._reads_left += len(data) / _TINY_BYTES - 1
        if self._reads_left < 0:
            raise BoundError("the server sends too little at a time")
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
        stream = TlsStream(self, ssl_context, server_hostname)
        try:
            await stream.shake_hands()
        except BaseException:
            await self.aclose()
            raise
        return BoundedStream(stream, below=self)

    def get_extra_info(self, info: str) -> object:
        return self._stream.get_extra_info(info)


def client_context() -> ssl.SSLContext:
    """Trust what the system trusts, or SSL_CERT_FILE and SSL_CERT_DIR name."""
    return without_expensive_exchanges(httpcore2.default_ssl_context())


def without_expensive_exchanges(context: ssl.SSLContext) -> ssl.SSLContext:
    """Refuse what lets a server make its client compute at will."""
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context


class TlsStream(httpcore2.AsyncNetworkStream):
    """Shakes hands in a thread: TLS 1.3 lets the server ask for a key exchange of 200 ms."""

    def __init__(self, transport: httpcore2.AsyncNetworkStream, context: ssl.SSLContext, host: str | None) -> None:
        self._transport = transport
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)

    async def shake_hands(self) -> None:
        """Raises ssl.SSLError."""
        while True:
            try:
                await asyncio.to_thread(self._tls.do_handshake)
            except ssl.SSLWantReadError:
                await self._exchange()
            else:
                return await self._send()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        while True:
            try:
                return self._tls.read(max_bytes)
            except ssl.SSLWantReadError:
                await self._exchange(timeout)
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        self._tls.write(buffer)
        await self._send(timeout)

    async def aclose(self) -> None:
        await self._transport.aclose()

    def get_extra_info(self, info: str) -> object:
        return self._tls if info == "ssl_object" else self._transport.get_extra_info(info)

    async def _exchange(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await self._send(timeout)
        data = await self._transport.read(_RECORDS_BYTES, timeout)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    async def _send(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        data = self._outgoing.read()
        if data:
            await self._transport.write(data, timeout)
