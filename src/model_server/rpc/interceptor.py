"""From exceptions to gRPC statuses, in one place.

TGI answers every error with INTERNAL and the exception's text, which the router passes on to the caller. Ours says so
much only of what a call asked for, and to the router while it starts: its operator reads that. It cuts the text so that
it always fits the trailers: a longer one would turn the call into RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import quote

import grpc

from model_server.errors import FatalError, ModelServerError, public_text

logger = logging.getLogger(__name__)

S = TypeVar("S")
Q = TypeVar("Q")
A = TypeVar("A")

# Bytes that an error text may take in its percent-encoded form (gRPC's metadata limit is 8 KiB in all).
MAX_ENCODED_TEXT = 4096


_AT_START = frozenset({"Info", "ServiceDiscovery", "Warmup"})


def is_fatal(error: BaseException) -> bool:
    """Must the process end? Our own exceptions say so; a foreign RuntimeError leaves the device in doubt, as in TGI."""
    if isinstance(error, ModelServerError):
        return isinstance(error, FatalError)
    return isinstance(error, RuntimeError) or not isinstance(error, Exception)


def fit_text(text: str) -> str:
    """The longest beginning of `text` whose percent-encoded form fits MAX_ENCODED_TEXT bytes."""
    if len(_encoded(text)) <= MAX_ENCODED_TEXT:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(_encoded(text[:middle] + "…")) <= MAX_ENCODED_TEXT else (low, middle - 1)
    return text[:low] + "…"


def _encoded(text: str) -> str:
    return quote(text, errors="replace")


def answering_errors(
    method: Callable[[S, Q, grpc.aio.ServicerContext], Awaitable[A]],
) -> Callable[[S, Q, grpc.aio.ServicerContext], Awaitable[A]]:
    """Decorator of an RPC method: an exception is logged once and becomes INTERNAL."""

    @functools.wraps(method)
    async def wrapped(self: S, request: Q, context: grpc.aio.ServicerContext) -> A:
        try:
            return await method(self, request, context)
        except Exception as error:
            expected = isinstance(error, ModelServerError)
            logger.error("%s failed: %s", method.__name__, error, exc_info=None if expected else error)
            text = str(error) or type(error).__name__ if method.__name__ in _AT_START else public_text(error)
            await context.abort(grpc.StatusCode.INTERNAL, fit_text(text))
            raise AssertionError("abort does not return") from error

    return wrapped
