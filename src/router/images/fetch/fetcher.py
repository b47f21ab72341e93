"""GETs images, checking each redirect; clients learn only fixed reasons."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Literal
from urllib.parse import urljoin, urlsplit

import httpcore2

from router.errors import ImageError
from router.images.asked import check_size
from router.images.fetch.addresses import CheckedBackend, NotAllowedError, Resolve
from router.images.fetch.bounded_stream import (
    HEAD_BYTES,
    BoundedStream,
    BoundError,
    client_context,
    without_expensive_exchanges,
)
from router.images.fetch.places import FetchPlaces
from router.images.fetch.resolver import Resolver

logger = logging.getLogger(__name__)


MAX_REDIRECTS = 2
_MAX_AT_ONCE = 16
_MAX_OF_A_HOST = 4
_MAX_URL = 8192
_REDIRECTS = (301, 302, 303, 307, 308)
_TINY_BYTES = 256
_MOST_TINY_PIECES = 512
_PORTS = {"http": 80, "https": 443}
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "tercet"}


class _FetchError(Exception):
    """Takes the reason."""


class UrlFetcher:
    """Fetches http and https URLs, without cookies, proxy or credentials."""

    def __init__(
        self,
        *,
        mode: Literal["public", "all"],
        limit_s: float,
        hosts: Collection[str] = (),
        resolve: Resolve | None = None,
        ssl_context: ssl.SSLContext | None = None,
        wait_s: float | None = None,
    ) -> None:
        """Take the rules of fetching.

        Args:
            limit_s: Of a fetch in all, and of its wait.
            hosts: `HOST` or `HOST:PORT`, perhaps private; empty: any public.
        """
        self._mode = mode
        self._limit_s = limit_s
        self._hosts = frozenset(map(_listed, hosts))
        self._places = FetchPlaces(
            in_all=_MAX_AT_ONCE, of_a_host=_MAX_OF_A_HOST, wait_s=limit_s if wait_s is None else wait_s
        )
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=client_context() if ssl_context is None else without_expensive_exchanges(ssl_context),
            max_connections=_MAX_AT_ONCE,
            max_keepalive_connections=0,
            network_backend=CheckedBackend(self._may_be_private, resolve or Resolver().resolve),
        )

    async def fetch(self, url: str, max_bytes: int) -> bytes:
        """Fetch a file, within `max_bytes`."""
        host, left_s = "?", self._limit_s
        try:
            for _ in range(MAX_REDIRECTS + 1):
                host = self._checked_host(url)
                async with self._places.of(host):  # how long others take is not this fetch's time
                    began = time.monotonic()
                    async with asyncio.timeout(left_s):
                        answer = await self._get(url, max_bytes)
                    left_s -= time.monotonic() - began
                if isinstance(answer, bytes):
                    return answer
                url = _redirected(url, answer)
            reason = "too many redirects"
        except TimeoutError:
            reason = "timed out"
        except NotAllowedError:
            reason = "address not allowed"
        except (_FetchError, BoundError) as error:
            reason = str(error)
        except (OSError, httpcore2.NetworkError, httpcore2.TimeoutException, ssl.SSLError):
            reason = "connection failed"
        except (httpcore2.ProtocolError, httpcore2.UnsupportedProtocol, UnicodeError, ValueError):
            reason = "the answer is not HTTP, or the URL is not valid"
        logger.info("an image of the host %r was not fetched: %s", host[:100], reason)
        raise ImageError(f"Could not fetch image: {reason}")

    async def _get(self, url: str, max_bytes: int) -> bytes | str:
        """The file, or where a redirect leads."""
        headers = [*_HEADERS.items(), ("Host", urlsplit(url).netloc)]
        async with self._pool.stream("GET", url, headers=headers) as response:
            fields = {name.lower(): value for name, value in response.headers}
            if response.status in _REDIRECTS:
                return fields.get(b"location", b"").decode("ascii")
            if response.status != 200:
                raise _FetchError(f"status {response.status}")
            if fields.get(b"content-encoding", b"identity").lower() not in (b"identity", b""):
                raise _FetchError("the file is compressed")
            length = fields.get(b"content-length", b"0")
            if length.isdigit():
                check_size(int(length[:20]), max_bytes)
            stream = response.extensions["network_stream"]
            assert isinstance(stream, BoundedStream)
            stream.allow(max_bytes + max_bytes // 8 + HEAD_BYTES)
            return await _read(response, max_bytes)

    def _checked_host(self, url: str) -> str:
        """Return a plain URL's allowed host."""
        if len(url) > _MAX_URL or not url.isascii() or not url.isprintable() or "\\" in url or " " in url:
            raise _FetchError("the URL is not valid")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise _FetchError("the URL is not valid") from None
        if parts.scheme not in _PORTS or not host or "@" in parts.netloc:
            raise _FetchError("the URL is not valid")
        if self._hosts and not self._is_listed(host, port or _PORTS[parts.scheme]):
            raise _FetchError("host not allowed")
        return _without_dot(host)

    def _is_listed(self, host: str, port: int) -> bool:
        host = _without_dot(host.lower())
        return host in self._hosts or f"{host}:{port}" in self._hosts

    def _may_be_private(self, host: str, port: int) -> bool:
        return self._mode == "all" or self._is_listed(host, port)


class FetcherApart:
    """Fetches on an event loop of its own: what a server sends may take 0.3 s to parse, and holds up no request."""

    def __init__(self, fetch: Callable[[str, int], Coroutine[Any, Any, bytes]]) -> None:
        self._fetch = fetch
        self._loop: asyncio.AbstractEventLoop | None = None

    async def fetch(self, url: str, max_bytes: int) -> bytes:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._run, args=(self._loop,), name="image fetches", daemon=True).start()
        fetching = asyncio.run_coroutine_threadsafe(self._fetch(url, max_bytes), self._loop)
        return await asyncio.wrap_future(fetching)

    def close(self) -> None:
        """End the thread, with what it fetches."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.closing(loop):
            loop.run_forever()
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left))


async def _read(response: httpcore2.Response, max_bytes: int) -> bytes:
    """Read the file, in pieces of some length."""
    data = bytearray()
    num_pieces = 0
    try:
        async for piece in response.aiter_stream():
            data += piece
            num_pieces += 1
            check_size(len(data), max_bytes)
            if num_pieces > _MOST_TINY_PIECES + len(data) // _TINY_BYTES:
                raise _FetchError("the file comes in pieces that are too small")
    except (httpcore2.NetworkError, httpcore2.ProtocolError):
        raise ImageError("Failed to read image data: it ended too early") from None
    return bytes(data)


def _without_dot(host: str) -> str:
    """Drop a host's final dot."""
    return host.removesuffix(".")


def _listed(asked: str) -> str:
    """Spell the option's host as in URLs."""
    return _without_dot(asked.lower()).replace(".:", ":")


def _redirected(url: str, location: str) -> str:
    if not location:
        raise _FetchError("a redirect without a target")
    target = urljoin(url, location).partition("#")[0]
    if url.startswith("https://") and not target.startswith("https://"):
        raise _FetchError("a redirect from https to http")
    return target
