"""Server-sent events: framing, writing, keep-alive, absent readers.

Framed by hand: the framework's helpers cost six times as much.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.http.disconnect import left
from router.api.http.fast_path import SEND_BODY
from router.api.json_out import dumps
from router.tracing import entered_gen_ai

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b":\n\n"


def frame(data: bytes) -> bytes:
    """Frame an event; clients compare `data: [DONE]` with its single space."""
    return b"data: " + data + b"\n\n"


def event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


class EventStream(Response):
    """Writes `events` as they come, and calls `close` exactly once."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        headers: Mapping[str, str],
        close: Callable[[], None],
        stalled_s: float,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        if (gen_ai := entered_gen_ai()) is not None:
            gen_ai.is_stream = True
        self.status_code = 200
        self.background = None
        self.init_headers(
            {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
            | dict(headers)
        )
        self._events = events
        self._close = close
        self._stalled_s = stalled_s
        self._keep_alive_s = keep_alive_s
        self._is_complete = False
        self._wrote_at = 0.0
        self._writing_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send, scope.get(SEND_BODY, send)))
        gone = asyncio.ensure_future(left(receive))
        self._watch(writer, send)
        try:
            await asyncio.wait((writer, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._end(writer, gone)
        if not writer.cancelled() and (failure := writer.exception()) is not None:
            raise failure

    async def _write(self, send: Send, send_body: Send) -> None:
        self._wrote_at = time.monotonic()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._events:
            self._writing_since = time.monotonic()
            await send_body({"type": "http.response.body", "body": piece, "more_body": True})
            self._wrote_at, self._writing_since = self._writing_since, None
        self._is_complete = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _watch(self, writer: asyncio.Future[None], send: Send) -> None:
        """Send a comment after silence, and end streams not read, by one timer."""
        now = time.monotonic()
        if self._writing_since is not None:
            due = self._writing_since + self._stalled_s
            if due <= now:
                logger.warning("a client has read nothing for %.0f s: its stream ends", self._stalled_s)
                writer.cancel()
                return
        else:
            due = (self._wrote_at or now) + self._keep_alive_s
            if due <= now and (self._comment is None or self._comment.done()):
                self._comment = asyncio.ensure_future(self._write_comment(send))
            due = max(due, now + self._keep_alive_s) if due <= now else due
        self._timer = asyncio.get_running_loop().call_later(min(due - now, self._stalled_s), self._watch, writer, send)

    async def _write_comment(self, send: Send) -> None:
        if self._is_complete:
            return
        self._wrote_at = time.monotonic()
        await send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})

    async def _end(self, writer: asyncio.Future[None], gone: asyncio.Future[None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        gone.cancel()
        writer.cancel()
        tasks = [writer, gone] + ([self._comment] if self._comment is not None else [])
        if self._comment is not None:
            self._comment.cancel()
        await asyncio.wait(tasks)
        await self._events.aclose()
        self._close()
