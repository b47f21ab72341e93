"""The load: many HTTP connections, events counted and hardly looked at."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gpu.subjects.arrivals import Spread
from benchmarks.router.child import Handler, run_child

_LENGTH = re.compile(rb"content-length: (\d+)")
_LAST_CHUNK = b"0\r\n\r\n"
_OPEN_AT_ONCE = 200
PROMPTS = Spread(32, 2048)
ANSWERS = Spread(16, 512)


class Connection(asyncio.Protocol):
    """One connection with one request at a time. `num_events` counts a stream's events."""

    transport: asyncio.Transport

    def __init__(self, load: Load) -> None:
        self._load = load
        self._is_stream = False
        self._buffer = b""
        self._began = False
        self.sent_at = 0.0
        self.trace: list[float] | None = None
        self.last_event_at = 0.0
        self.is_open = True
        self.on_end: Callable[[Connection], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._load.num_lost += 1

    def send(self, path: str, body: bytes, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._began = False
        self._buffer = b""
        self.last_event_at = 0.0
        self.sent_at = time.monotonic()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
        self.transport.write(head.encode() + str(len(body)).encode() + b"\r\n\r\n" + body)

    def data_received(self, data: bytes) -> None:
        if not self._is_stream:
            self._buffer += data
            self._look_for_answer()
            return
        num_events = data.count(b"data:")
        self._load.num_events += num_events
        if self._load.gaps_s is not None and num_events:
            self._note_gap(self._load.gaps_s, num_events)
        if self.trace is not None:
            self.trace.extend([time.monotonic()] * num_events)
        if not self._began:
            self._begin(data, num_events)
        if data.endswith(_LAST_CHUNK):
            self._end()

    def _note_gap(self, gaps_s: list[float], num_events: int) -> None:
        now = time.monotonic()
        if self.last_event_at:
            gaps_s.append(now - self.last_event_at)
            gaps_s.extend([0.0] * (num_events - 1))
        self.last_event_at = now

    def _begin(self, data: bytes, num_events: int) -> None:
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self._load.num_refused += 1
            self._began = True
        elif num_events:
            self._began = True
            self._load.num_begun += 1
            self._load.first_event_s.append(time.monotonic() - self.sent_at)

    def _look_for_answer(self) -> None:
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        found = _LENGTH.search(head)
        if not separator or found is None or len(body) < int(found[1]):
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self._load.num_refused += 1
        self._load.answer_s.append(time.monotonic() - self.sent_at)
        self._end()

    def _end(self) -> None:
        self._load.num_ended += 1
        if self.on_end is not None:
            self.on_end(self)


class Load:
    """The commands of the load client."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connections: list[Connection] = []
        self._arrivals: asyncio.Task[None] | None = None
        self.gaps_s: list[float] | None = None
        self.forget()

    def forget(self) -> None:
        """Every count begins again."""
        self.num_events = self.num_begun = self.num_ended = self.num_refused = self.num_lost = 0
        self.first_event_s: list[float] = []
        self.answer_s: list[float] = []

    def counts(self) -> dict[str, Any]:
        names = ("num_events", "num_begun", "num_ended", "num_refused", "num_lost", "first_event_s", "answer_s")
        return {"at": time.monotonic()} | {name: getattr(self, name) for name in names}

    async def open(self, number: int, low_water: int = 1) -> None:
        """So many connections more, idle. This process is woken when `low_water` bytes have come."""
        loop = asyncio.get_running_loop()
        for first in range(0, number, _OPEN_AT_ONCE):
            made = await asyncio.gather(
                *(
                    loop.create_connection(lambda: Connection(self), "127.0.0.1", self._port)
                    for _ in range(min(_OPEN_AT_ONCE, number - first))
                )
            )
            for transport, protocol in made:
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
                self._connections.append(protocol)

    def send(self, body: dict[str, Any], is_stream: bool, first: int = 0) -> None:
        """One request on every connection from number `first` on."""
        path = "/generate_stream" if is_stream else "/generate"
        for index, connection in enumerate(self._connections[first:], start=first):
            connection.send(path, _numbered(body, index), is_stream=is_stream)

    def arrive(self, rate: float, seed: int) -> None:
        """From now on streams arrive as a Poisson process of `rate` a second; see `Arrivals`."""
        self._arrivals = asyncio.get_running_loop().create_task(self._arrive(Arrivals(rate, seed)))

    async def _arrive(self, arrivals: Arrivals) -> None:
        loop = asyncio.get_running_loop()
        free: list[Connection] = []
        due = loop.time()
        while True:
            due += arrivals.pause_s()
            await asyncio.sleep(max(due - loop.time(), 0.0))
            if not free:
                await self.open(1)
                free.append(self._connections[-1])
                free[-1].on_end = free.append
            free.pop().send("/generate_stream", arrivals.body(), is_stream=True)

    def note_gaps(self) -> None:
        """From now on the times between a stream's events are noted."""
        self.gaps_s = []

    def noted_gaps(self) -> list[float]:
        """In ascending order, at most a thousand that stand for all."""
        ordered = sorted(self.gaps_s or [])
        self.gaps_s = None
        return [ordered[round(share / 999 * (len(ordered) - 1))] for share in range(1000)] if ordered else []

    async def end_arrivals(self) -> None:
        """Nothing arrives any more, and all streams are hung up on."""
        assert self._arrivals is not None
        self._arrivals.cancel()
        await asyncio.wait([self._arrivals])
        self.close()

    def trace(self) -> None:
        """From now on the first connection notes when its events come."""
        self._connections[0].trace = []

    def traced(self) -> list[float]:
        trace = self._connections[0].trace
        assert trace is not None
        return trace

    def close(self, first: int = 0) -> None:
        """Hang up, whatever is under way on the connections from number `first` on."""
        for connection in self._connections[first:]:
            connection.transport.abort()
        del self._connections[first:]

    async def closed_loop(self, body: dict[str, Any], is_stream: bool, total: int) -> float:
        """`total` requests over the open connections, each sends its next when its last is answered; seconds."""
        path = "/generate_stream" if is_stream else "/generate"
        index = 0
        finished = asyncio.Event()

        def send_next(connection: Connection) -> None:
            nonlocal index
            if self.num_ended >= total:
                finished.set()
            if index < total:
                connection.send(path, _numbered(body, index), is_stream=is_stream)
                index += 1

        started = time.monotonic()
        for connection in self._connections:
            connection.on_end = send_next
            send_next(connection)
        await finished.wait()
        return time.monotonic() - started


class Arrivals:
    """Requests with prompts and answers of many lengths, no two prompts with the same beginning."""

    def __init__(self, rate: float, seed: int) -> None:
        self._rate = rate
        self._source = random.Random(seed)
        self._num_drawn = 0

    def pause_s(self) -> float:
        return self._source.expovariate(self._rate)

    def body(self) -> bytes:
        self._num_drawn += 1
        # Words of one token each; the number and what the tokenizer adds are eight more.
        prompt = " the" * max(PROMPTS.draw(self._source) - 8, 1)
        parameters = {"max_new_tokens": ANSWERS.draw(self._source), "details": True}
        return _numbered({"inputs": prompt, "parameters": parameters}, self._num_drawn)


def _numbered(body: dict[str, Any], index: int) -> bytes:
    """A prompt of its own for every request, all of the same length."""
    return json.dumps(body | {"inputs": f"{index:06d} {body['inputs']}"}).encode()


async def setup() -> Mapping[str, Handler]:
    load = Load(int(sys.argv[1]))
    names = (
        "forget", "counts", "open", "send", "trace", "traced", "close", "closed_loop", "arrive", "note_gaps",
        "noted_gaps", "end_arrivals",
    )  # fmt: skip
    return {name: getattr(load, name) for name in names}


if __name__ == "__main__":
    run_child(setup)
