"""One end of the stream between two launchers, with beats between messages."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import grpc

_BEATS_PER_LEASE = 5

M = TypeVar("M")
R = TypeVar("R")


class Stream(Generic[M]):
    """The thread of the one side reads `messages`; gRPC reads what this side says from `outgoing`."""

    def __init__(self, beat: Callable[[], M], lease_s: float) -> None:
        """`beat`: makes an empty message."""
        self._beat, self.lease_s = beat, lease_s
        self._outbox: queue.SimpleQueue[M | None] = queue.SimpleQueue()
        self._heard_at = time.monotonic()
        self._lock = threading.Lock()
        self.is_closed = threading.Event()
        """The other side has ended the stream, or the connection is gone."""
        self.code: grpc.StatusCode | None = None
        """What gRPC says of its end, if that was a failure."""

    def say(self, message: M) -> None:
        self._outbox.put(message)

    def finish(self) -> None:
        """Nothing more will be said; what was said is still sent."""
        self._outbox.put(None)

    def outgoing(self) -> Iterator[M]:
        while not self.is_closed.is_set():
            try:
                message = self._outbox.get(timeout=self.lease_s / _BEATS_PER_LEASE)
            except queue.Empty:
                yield self._beat()
                continue
            if message is None:
                return
            yield message

    def read(self, messages: Iterable[R], on_message: Callable[[R], None], on_change: Callable[[], None]) -> None:
        """Read until the stream ends, on a thread of its own; call `on_change` after each message and at the end."""
        try:
            for message in messages:
                self.heard()
                on_message(message)
                on_change()
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call):  # at a server's end it says nothing
                self.code = error.code()
        finally:
            self.close()
            on_change()

    def close(self) -> None:
        self.is_closed.set()
        self._outbox.put(None)

    def heard(self) -> None:
        with self._lock:
            self._heard_at = time.monotonic()

    @property
    def is_lost(self) -> bool:
        """Whether nothing has come for as long as the lease."""
        with self._lock:
            return time.monotonic() - self._heard_at > self.lease_s
