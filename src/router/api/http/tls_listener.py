"""Accepts TLS connections, counted and timed from before their handshake, unlike asyncio's."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any

from router.api.http.connection import Bounds, Connection

_ACCEPTED_AT_ONCE = 100
_FULL_PAUSE_S = 0.5


class TlsListener:
    """One listening socket, instead of asyncio's server."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], Connection],
        *,
        context: ssl.SSLContext,
        bounds: Bounds,
        connections: set[Any],
    ) -> None:
        """Take a listener, and the connections that the server ends."""
        self._listener = listener
        self._make = make
        self._context = context
        self._bounds = bounds
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._start()

    def close(self) -> None:
        """No more are accepted."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        """Wait, as asyncio's; connections are the server's."""

    def _start(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # too many open files, no memory: a while later there may be some
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(_FULL_PAUSE_S, self._start)
                return
            if len(self._connections) >= self._bounds.most_held:
                client.close()
            else:
                _Handshake(client, self._make, self._context, self._bounds.head_s, self._connections)


class _Handshake:
    """A connection before its handshake."""

    def __init__(
        self,
        client: socket.socket,
        make: Callable[[], Connection],
        context: ssl.SSLContext,
        limit_s: float,
        connections: set[Any],
    ) -> None:
        client.setblocking(False)
        self._connections = connections
        connections.add(self)
        self._make = make
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(
            loop.connect_accepted_socket(self._connection, client, ssl=context, ssl_handshake_timeout=limit_s)
        )
        self._task.add_done_callback(self._ended)

    def shutdown(self) -> None:
        """End without waiting for handshakes."""
        self._task.cancel()

    def _connection(self) -> Connection:
        connection = self._make()
        connection.replaces = self
        return connection

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._connections.discard(self)
        if not task.cancelled():
            task.exception()  # a client that speaks no TLS, or disconnected: asyncio would log what is never looked at
