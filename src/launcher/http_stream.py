"""One HTTP/1.1 connection that streams answers, by asyncio's transport and llhttp's parser.

A general client costs several times as much for each event, which is time taken from the measured server.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson

READ_BYTES = 2**16
_NO_TLS = ("wrong version number", "record layer failure")
"""What OpenSSL says of an answer in plain HTTP, by its version."""


def server_url(text: str) -> str:
    """Return the URL for `Connection`: `http://` may be missing, and OpenAI's `/v1` and route at its end go."""
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    return url.removesuffix("/chat/completions").removesuffix("/v1")


def reason_of(error: OSError) -> str:
    """Why no server answers, in a few words."""
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).replace("_", " ").lower()
        return f"no TLS connection: {reason}{'; is it http://?' if reason in _NO_TLS else ''}"
    if error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error) or "it takes too long"


def message_of(answer: Any) -> str:
    """What an error says, in TGI's form or in OpenAI's; empty if it is neither."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


class BadAnswerError(Exception):
    """The server refused the request, or its answer broke off."""

    def __init__(self, text: str, *, status: int | None = None, body: str = "") -> None:
        """status, body: of a refusal."""
        super().__init__(text)
        self.status, self.body = status, body

    @property
    def message(self) -> str:
        """What the server says in its refusal, without the JSON around it; empty if it says nothing."""
        try:
            return message_of(orjson.loads(self.body))
        except orjson.JSONDecodeError:
            return ""


class Connection:
    """One request at a time on a socket that is kept.

    An answer that is not read to its end must be closed (`contextlib.aclosing`) before the next request.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Take scheme, host, port, and the path before every route.

        Raises:
            ValueError: Another scheme than http and https, or a user name.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url} is not an http:// or https:// URL")
        if parts.username is not None:
            raise ValueError("must not hold a user name; give a key with --api-key")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in {"host": parts.netloc, **headers}.items())
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.headers: dict[str, str] = {}
        """Of the last answer, by names in lower case."""

    async def get(self, path: str) -> bytes:
        """Body of the answer. Raises BadAnswerError, OSError."""
        request = f"GET {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n"
        return b"".join([part async for part in self._exchange(request.encode())])

    async def post(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """Pieces of the answer's body as they come. Raises BadAnswerError, OSError."""
        about = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}{about}\r\n"
        async with aclosing(self._exchange(head.encode() + body)) as parts:
            async for part in parts:
                yield part

    async def events(self, path: str, body: bytes) -> AsyncGenerator[list[bytes], None]:
        """Post, and yield the data of server-sent events without `[DONE]`, those that came together in one list."""
        rest = b""
        async with aclosing(self.post(path, body)) as parts:
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                datas = [line[5:].strip() for line in lines if line.startswith(b"data:")]
                yield [data for data in datas if data and data != b"[DONE]"]

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _exchange(self, request: bytes) -> AsyncGenerator[bytes, None]:
        answer = _Answer()
        self.headers = answer.headers
        finished = False
        try:
            reader, data = await self._first_bytes(request)
            while data:
                answer.feed(data)
                for part in answer.pop():
                    yield part
                if answer.complete:
                    finished = answer.keeps_alive
                    break
                data = await reader.read(READ_BYTES)
            answer.check()
        except httptools.HttpParserError as error:
            raise BadAnswerError(f"not HTTP: {error}") from None
        finally:
            if not finished:
                self.close()

    async def _first_bytes(self, request: bytes) -> tuple[asyncio.StreamReader, bytes]:
        """Send, and wait for the answer to begin. The server may have closed a kept connection: then again."""
        if self._streams is not None:
            reader, writer = self._streams
            try:
                writer.write(request)
                if data := await reader.read(READ_BYTES):
                    return reader, data
            except OSError:
                pass
            self.close()
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
        self._streams = (reader, writer)
        writer.write(request)
        return reader, await reader.read(READ_BYTES)


def event_object(data: bytes) -> dict[str, Any]:
    """The data of an event. Raises BadAnswerError if it is not a JSON object."""
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        event = None
    if not isinstance(event, dict):
        raise BadAnswerError(f"an event that is not a JSON object: {data[:100].decode(errors='replace')}")
    return event


class _Answer:
    """Callbacks of the parser."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._refusal: list[bytes] = []
        self.headers: dict[str, str] = {}
        self.complete = False
        self.keeps_alive = False

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def pop(self) -> list[bytes]:
        """Body since the last call; nothing of a refusal's."""
        if self._parser.get_status_code() != 200:
            self._refusal += self._body
            self._body = []
        parts, self._body = self._body, []
        return parts

    def check(self) -> None:
        """Raises BadAnswerError unless a whole answer with status 200 has come."""
        status = self._parser.get_status_code()
        if status not in (0, 200):
            text = b"".join(self._refusal).decode(errors="replace")
            raise BadAnswerError(f"status {status}: {text[:300]}", status=status, body=text)
        if not self.complete:
            raise BadAnswerError("the connection was closed in the middle of an answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        self.complete = True
        self.keeps_alive = self._parser.should_keep_alive()
