"""HTTP to a model's router on its unix socket: requests are written whole, answers and uploads go as they come."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import cast

import httptools

Headers = list[tuple[bytes, bytes]]

_MOST_UNREAD = 256 * 1024
_MOST_IDLE = 64
_CONNECT_TIMEOUT_S = 10.0
_CLOSED_WITHIN_S = 0.1


class UpstreamError(Exception):
    """The model's router does not answer."""


class NotConnectedError(UpstreamError):
    """The router cannot be reached, and has seen nothing of the request."""


class _Connection(asyncio.Protocol):
    """One connection, and the answer that comes on it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.is_lost = False
        self.is_reused = False
        self.has_answer = self.is_done = False
        self.status = 0
        self.headers: Headers = []
        self._parser = httptools.HttpResponseParser(self)
        self._has_no_body = False
        self._parts: deque[bytes] = deque()
        self._unread = 0
        self._is_paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_cut = False

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no instance of it

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.is_lost = True
            self.transport.abort()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._has_room.set()
        self._wake()

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    # The parser's side

    def on_message_begin(self) -> None:
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status, self.has_answer = status, True
            self._has_room.set()  # of a refused upload nothing more is read
            self.is_done = self._has_no_body

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._unread += len(body)
        if self._unread > _MOST_UNREAD and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        self.is_done = self.has_answer

    # The request's side

    def send(self, request: bytes, *, has_no_body: bool) -> None:
        """Write a request. has_no_body: its answer is a head alone."""
        self.has_answer = self.is_done = False
        self._has_no_body = has_no_body
        self.transport.write(request)

    async def send_parts(self, parts: AsyncIterator[bytes]) -> None:
        """Write a body as it comes, as long as it has no answer. Raises UpstreamError."""
        async for part in parts:
            await self._has_room.wait()
            self._is_cut = self.has_answer
            if self._is_cut:
                return
            if self.is_lost:
                raise UpstreamError
            if part:
                self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        self.transport.write(b"0\r\n\r\n")

    async def answered(self) -> None:
        """Wait for the head. Raises UpstreamError."""
        while not self.has_answer:
            if self.is_lost:
                raise UpstreamError
            await self._wait()

    async def read(self) -> bytes:
        """Return what has come since the last call, empty at the end. Raises UpstreamError."""
        while not self._parts:
            if self.is_done:
                return b""
            if self.is_lost:
                raise UpstreamError
            await self._wait()
        data = self._parts.popleft() if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._unread = 0
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()
        return data

    @property
    def may_be_used_again(self) -> bool:
        return (
            self.is_done
            and not (self.is_lost or self._is_cut)
            and not self._has_no_body
            and self._parser.should_keep_alive()
        )

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Answer:
    """An answer whose head has come; to be closed."""

    def __init__(self, upstream: Upstream, connection: _Connection) -> None:
        self.status, self.headers = connection.status, connection.headers
        self._upstream, self._connection = upstream, connection
        self.read = connection.read

    @property
    def is_whole(self) -> bool:
        """Whether nothing more than what has come will come."""
        return self._connection.is_done

    async def body(self) -> bytes:
        """Return all of it. Raises UpstreamError."""
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        self._upstream.release(self._connection)


class Upstream:
    """The router of one model; idle connections are kept."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: str,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: bytes | AsyncIterator[bytes] = b"",
    ) -> Answer:
        """Send a request and wait for the head of its answer.

        Args:
            body: Parts are sent as they come, and not again.

        Raises:
            NotConnectedError: The router is not there.
            UpstreamError: It ended without an answer.
        """
        lines = [b"%b %b HTTP/1.1" % (method.encode(), target)]
        lines += [b"%b: %b" % header for header in headers]
        if not any(name == b"host" for name, _ in headers):
            lines.append(b"host: localhost")
        if not isinstance(body, bytes):
            lines.append(b"transfer-encoding: chunked")
            return await self._upload(b"\r\n".join((*lines, b"", b"")), body)
        if body or method not in ("GET", "HEAD", "DELETE", "OPTIONS"):
            lines.append(b"content-length: %d" % len(body))
        head = b"\r\n".join((*lines, b"", b""))
        while True:
            connection = await self._connected()
            sent_at = time.monotonic()
            try:
                connection.send(head + body, has_no_body=method == "HEAD")
                await connection.answered()
            except UpstreamError:
                # A kept connection may have been closed in that moment, with nothing read of the request.
                connection.transport.abort()
                if time.monotonic() - sent_at > _CLOSED_WITHIN_S:
                    raise
                # A new one is lost at once where the router is being killed, whose socket still accepts.
                if not connection.is_reused:
                    raise NotConnectedError from None
            except BaseException:
                connection.transport.abort()
                raise
            else:
                return Answer(self, connection)

    async def _upload(self, head: bytes, parts: AsyncIterator[bytes]) -> Answer:
        connection = await self._connected(is_new=True)
        try:
            connection.send(head, has_no_body=False)
            await connection.send_parts(parts)
            await connection.answered()
        except BaseException:
            connection.transport.abort()
            raise
        return Answer(self, connection)

    async def _connected(self, *, is_new: bool = False) -> _Connection:
        while self._idle and not is_new:
            connection = self._idle.pop()
            if not connection.is_lost and not connection.transport.is_closing():
                connection.is_reused = True
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, made = await loop.create_unix_connection(_Connection, self._path)
        except (OSError, TimeoutError):
            raise NotConnectedError from None
        return made

    def release(self, connection: _Connection) -> None:
        """Keep a connection whose answer has been read, and close any other: its request ends."""
        if connection.may_be_used_again and len(self._idle) < _MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.transport.abort()

    def close(self) -> None:
        """Close idle connections."""
        while self._idle:
            self._idle.pop().transport.abort()
