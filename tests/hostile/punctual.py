"""Clients whose requests a busy machine may delay: what came late is asked anew, and only that.

A server under attack gives a request two seconds to arrive. To a client that got no core in between it rightly answers
408, and it closes a kept connection in the moment in which that client uses it again. Neither is a fault of the server;
a 408 for a request that was sent in time is one, and so is a new connection that ends without an answer.
"""

from __future__ import annotations

import time
from typing import Any

import httpx

ARRIVAL_S = 2
"""For a head and for a body, of the servers under attack."""
_MOST_TRIES = 20
_CUT = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


class _Sending:
    """When a request was sent, and whether over a connection that was there."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._sent = 0.0
        self._is_new = False

    def note(self, event: str) -> None:
        """Of httpcore's extension `trace`."""
        if event == "connection.connect_tcp.started":
            self._began, self._is_new = time.monotonic(), True
        elif event == "http11.send_request_headers.started" and not self._is_new:
            self._began = time.monotonic()
        elif event == "http11.send_request_body.complete":
            self._sent = time.monotonic()

    async def note_later(self, event: str, _: dict[str, Any]) -> None:
        self.note(event)

    def note_now(self, event: str, _: dict[str, Any]) -> None:
        self.note(event)

    def explains(self, status: int | None) -> bool:
        """Whether this machine may be why there is no answer (None), or this one."""
        # Also of a request that could not be sent to its end.
        is_late = (self._sent or time.monotonic()) - self._began >= ARRIVAL_S
        if status is None:
            return is_late or not self._is_new
        return is_late and status == httpx.codes.REQUEST_TIMEOUT


class PunctualTransport(httpx.AsyncHTTPTransport):
    """For clients on an event loop."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        for _ in range(_MOST_TRIES):
            sending = _Sending()
            request.extensions = {**request.extensions, "trace": sending.note_later}
            try:
                answer = await super().handle_async_request(request)
            except _CUT:
                if sending.explains(None):
                    continue
                raise
            if not sending.explains(answer.status_code):
                return answer
            await answer.aclose()
        raise AssertionError(f"{request.url}: this machine was too busy to send a request {_MOST_TRIES} times")


class PunctualThreadTransport(httpx.HTTPTransport):
    """The same for clients on threads."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        for _ in range(_MOST_TRIES):
            sending = _Sending()
            request.extensions = {**request.extensions, "trace": sending.note_now}
            try:
                answer = super().handle_request(request)
            except _CUT:
                if sending.explains(None):
                    continue
                raise
            if not sending.explains(answer.status_code):
                return answer
            answer.close()
        raise AssertionError(f"{request.url}: this machine was too busy to send a request {_MOST_TRIES} times")
