"""Shared by the groups: addresses, and a server without a free place. Runs in every group's environment."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

PLACES = int(os.environ.get("TERCET_PERMITS", "6"))
"""Requests that the server takes at once."""
START_LIMIT_S = 60.0


@pytest.fixture(scope="session")
def url() -> str:
    """A server with the demo model."""
    return _listening(os.environ["TERCET_URL"])


@pytest.fixture(scope="session")
def agent_url() -> str:
    """A server whose model calls a tool of a coding agent, and says that it is done when it reads the result."""
    return _listening(os.environ["TERCET_AGENT_URL"])


@pytest.fixture(scope="session")
def embed_url() -> str:
    """A server whose model gives vectors; so the next two, of scores and labels."""
    return _listening(os.environ["TERCET_EMBED_URL"])


@pytest.fixture(scope="session")
def rerank_url() -> str:
    return _listening(os.environ["TERCET_RERANK_URL"])


@pytest.fixture(scope="session")
def classify_url() -> str:
    return _listening(os.environ["TERCET_CLASSIFY_URL"])


@pytest.fixture(scope="session")
def faulty_url() -> str:
    """A router that demands the key, and fails where the prompt says `break down` or `stop short`."""
    return _listening(os.environ["TERCET_FAULTY_URL"])


@pytest.fixture(scope="session")
def key() -> str:
    return os.environ["TERCET_KEY"]


@pytest.fixture
def busy_url(url: str) -> Iterator[str]:
    """The server while it answers as many streams as it may."""
    with contextlib.ExitStack() as streams:
        for _ in range(PLACES):
            _open_stream(url, streams)
        yield url
    _until_free(url)


def _open_stream(url: str, streams: contextlib.ExitStack) -> None:
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 2000, "ignore_eos": True}}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    streams.callback(connection.close)
    connection.request("POST", "/generate_stream", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    streams.callback(response.close)
    assert response.status == 200, response.read()


def _until_free(url: str) -> None:
    """Waits until as many requests as the server takes are taken again."""
    deadline = time.monotonic() + START_LIMIT_S
    while "\ntgi_batch_current_size 0" not in (text := _get(url, "/metrics")) or "\ntgi_queue_size 0" not in text:
        assert time.monotonic() < deadline, "the server does not become idle"
        time.sleep(0.05)
    # A request that was left gives up its place a moment after it has left the batch.
    while not _is_answered(url):
        assert time.monotonic() < deadline, "the server does not give up its places"
        time.sleep(0.05)


def _is_answered(url: str) -> bool:
    """Whether the server takes a request."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    body = {"inputs": "Once", "parameters": {"max_new_tokens": 1}}
    connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
    status = connection.getresponse().status
    connection.close()
    return status == 200


def _listening(url: str) -> str:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            _get(url, "/health")
            return url
        except OSError:
            assert time.monotonic() < deadline, f"nothing listens on {url}"
            time.sleep(0.05)


def _get(url: str, path: str) -> str:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()
