"""From exceptions to gRPC statuses: INTERNAL with text, as TGI.

Texts go to callers only if they concern a call; they are cut to fit trailers, or would become RESOURCE_EXHAUSTED.
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
    """Whether the process must end; a foreign RuntimeError leaves the device in doubt, as in TGI."""
    if isinstance(error, ModelServerError):
        return isinstance(error, FatalError)
    return isinstance(error, RuntimeError) or not isinstance(error, Exception)


def fit_text(text: str) -> str:
    """Cut `text` to MAX_ENCODED_TEXT percent-encoded bytes."""
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
    """Log an RPC method's exception once, and answer INTERNAL."""

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
