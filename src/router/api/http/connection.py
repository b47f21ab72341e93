"""One HTTP connection: uvicorn's protocol, with bounds on clients' size and time that it lacks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.api.errors import error_body
from router.api.json_out import dumps

MAX_HEAD_BYTES = 64 * 1024
MAX_FIELDS = 256
MAX_PIPELINED = 64
MAX_REFUSED = 64
_LINGER_S = 1.0
# Timers come before reading: after a hold of the loop, what arrived in time may not be read when its time is over.
_LAST_LOOK_S = 0.05
_ANSWERS = {
    400: ("Bad Request", "bad_request", "invalid HTTP request"),
    408: ("Request Timeout", "request_timeout", "the request did not arrive in time"),
    431: ("Request Header Fields Too Large", "headers_too_large", "the request's header is too large"),
    503: ("Service Unavailable", "overloaded", "too many connections"),
}


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Times in seconds, from the first byte."""

    max_connections: int = 4096
    head_s: float = 10.0
    body_s: float = 60.0
    stalled_s: float = 30.0  # for a client to read anything of what is written

    @property
    def most_held(self) -> int:
        """Count connections with those being refused; beyond, hang up."""
        return self.max_connections + MAX_REFUSED


class _Answering:
    """The transport for an answer, which does not close it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        self._connection.close_after_answer()


class Connection(HttpToolsProtocol):
    """Answers 408, 431 or 503 beyond bounds; hangs up on clients that do not read."""

    def __init__(self, *arguments: Any, bounds: Bounds, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bounds = bounds
        self._in_head = True
        self._in_message = False
        self._num_begun = 0  # messages, in the read that is being parsed
        self._head_bytes = 0
        self._open: list[RequestResponseCycle] = []  # not answered yet; only the first is being answered
        self._refusal = 400
        self._timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self.replaces: Any = None
        """What stood for it among the open connections until it was made."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.connections.discard(self.replaces)
        super().connection_made(transport)
        if len(self.connections) > self._bounds.most_held:
            transport.abort()
        elif len(self.connections) > self._bounds.max_connections:
            self._refuse(503)
        else:
            self._start_timer(self._bounds.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_reading_timer()
        super().connection_lost(exc)
        self._disconnect()  # uvicorn tells the last request only, which may not be the one that runs

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_reading_timer()
        self._demand_reading()

    def resume_writing(self) -> None:
        self._stop_reading_timer()
        super().resume_writing()
        if self.transport.is_closing():
            self._demand_reading()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._demand_reading()

    def eof_received(self) -> None:
        self._close()  # as the transport does, but with a clock

    def on_response_complete(self) -> None:
        if self.pipeline and self._timer is not None and not self._is_refused:
            self._start_timer(self._bounds.body_s)  # of the one whose turn has come: until now it was not read
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(_LAST_LOOK_S, self._close)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        was_in_message, self._num_begun = self._in_message, 0
        self._unset_keepalive_if_required()
        self._parse(data)
        # Only what the parser still keeps to itself: complete fields are counted in on_header. Where other messages
        # came in the same read it is not known what belongs to this one; what follows is counted.
        is_alone = self._num_begun == 0 or (self._num_begun == 1 and not was_in_message)
        if self._in_head and is_alone and not self._is_refused:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431)
        self._watch_idle()

    def _parse(self, data: bytes) -> None:
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as stopped:
                    [num_parsed] = stopped.args
                    data = self._head_without_upgrade() + data[num_parsed:]
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        except httptools.HttpParserError:
            self._refuse(self._refusal)

    def _head_without_upgrade(self) -> bytes:
        """Parse the head again without Java's HTTP/2 offer, which HTTP/1.1 ignores, but the parser does not."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._num_begun += 1
        self._head_bytes = 0
        if self._timer is None:
            self._start_timer(self._bounds.head_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        size = sum(len(field) + len(text) for field, text in self.headers) if len(value) > 1024 else 0
        if len(self.headers) > MAX_FIELDS or size > MAX_HEAD_BYTES:
            self._refusal = 431
            raise ValueError("header too large")  # the parser stops and uvicorn asks for the answer

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("this is no proxy")
            return  # see `_head_without_upgrade`
        self._in_head = False
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at once")  # each takes some kilobytes, and one read holds thousands
        self._start_timer(self._bounds.body_s)
        super().on_headers_complete()
        self.cycle.transport = _Answering(self)  # type: ignore[assignment]
        self._open = [cycle for cycle in self._open if not cycle.response_complete]
        self._open.append(self.cycle)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_message = False
        self._stop_timer()
        super().on_message_complete()

    def _disconnect(self) -> None:
        """Tell all handlers that the client disconnected."""
        for cycle in self._open:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def close_after_answer(self) -> None:
        """Close after the last answer, whose request may still arrive."""
        if self.cycle.more_body and not self.transport.is_closing():
            self._linger()
        else:
            self._close()

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if self.pipeline:
            # Nothing is read while a request waits for an earlier one's answer: its sender is not late.
            self._start_timer(self._bounds.body_s)
        else:
            self._timer = self.loop.call_later(_LAST_LOOK_S, self._refuse, 408)

    def _watch_idle(self) -> None:
        """Watch idle connections: uvicorn's clock stops at any byte, such as a late body's."""
        is_idle = self.cycle is not None and self.cycle.response_complete and not self._in_message and not self.pipeline
        has_clock = self._timer is not None or self.timeout_keep_alive_task is not None
        if is_idle and not has_clock and not self._is_refused and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _close(self) -> None:
        """Close once the client has read, or does not."""
        if not self.transport.is_closing():
            self.transport.close()
            self._demand_reading()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _demand_reading(self) -> None:
        """Bound the wait for the client's reading."""
        unread = self.transport.get_write_buffer_size()
        if unread and self._reading_timer is None:
            self._reading_timer = self.loop.call_later(self._bounds.stalled_s, self._look_at_reading, unread)

    def _look_at_reading(self, unread: int) -> None:
        self._reading_timer = None
        if self.transport.get_write_buffer_size() < unread:
            self._demand_reading()
        else:
            self.transport.abort()

    def _stop_reading_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    def _refuse(self, status: int) -> None:
        """Answer why, if nothing was, and close."""
        self._stop_timer()
        if self._is_refused or self.transport.is_closing():
            return
        has_begun = any(cycle.response_started and not cycle.response_complete for cycle in self._open)
        self._disconnect()
        if has_begun:
            self._is_refused = True
            self._close()
            return
        reason, error_type, message = _ANSWERS[status]
        body = dumps(error_body(message, error_type))
        head = (
            f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._linger()

    def _linger(self) -> None:
        """Read on before closing: a reset would lose the answer."""
        self._is_refused = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self._stop_timer()
        self._timer = self.loop.call_later(_LINGER_S, self._close)
