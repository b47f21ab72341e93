"""Fetches run on an event loop of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from router.errors import ImageError
from router.images.fetch.fetcher import FetcherApart


class Fetcher:
    """Says which thread fetches; `wait` never ends."""

    def __init__(self) -> None:
        self.began, self.cancelled = threading.Event(), threading.Event()

    async def fetch(self, url: str, max_bytes: int) -> bytes:
        if url == "refused":
            raise ImageError("no")
        if url == "wait":
            self.began.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        return threading.current_thread().name.encode()


@pytest.fixture
def inner() -> Fetcher:
    return Fetcher()


@pytest.fixture
def apart(inner: Fetcher) -> Iterator[FetcherApart]:
    one = FetcherApart(inner.fetch)
    yield one
    one.close()
    one.close()


async def test_answers_and_refusals_pass(apart: FetcherApart) -> None:
    assert await apart.fetch("x", 1) == b"image fetches"
    with pytest.raises(ImageError):
        await apart.fetch("refused", 1)


@pytest.mark.parametrize("ended_by", ["request", "server"])
async def test_a_fetch_ends_with_its_request_and_with_the_server(
    ended_by: str, apart: FetcherApart, inner: Fetcher
) -> None:
    waiting = asyncio.create_task(apart.fetch("wait", 1))
    await asyncio.to_thread(inner.began.wait, 30)
    if ended_by == "request":
        waiting.cancel()
    else:
        apart.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.to_thread(inner.cancelled.wait, 30)
