"""The system's resolver in own threads: an uninterruptible lookup may take half a minute."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from router.errors import OverloadedError

LIMIT_S = 5.0
_MAX_AT_ONCE = 16
_RETRY_AFTER_S = 10

_Outcome = list[str] | Exception


class Resolver:
    """Shares one lookup of a host at a time, without a cache."""

    def __init__(self, *, limit_s: float = LIMIT_S, max_at_once: int = _MAX_AT_ONCE) -> None:
        """Bound a caller's wait, and lookups, abandoned included."""
        self._limit_s = limit_s
        self._max_at_once = max_at_once
        self._running: dict[tuple[str, int], asyncio.Future[_Outcome]] = {}

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return all addresses.

        Raises:
            OSError, TimeoutError, UnicodeError: It failed; OverloadedError with too many.
        """
        key = host, port
        running = self._running.get(key)
        if running is None:
            if len(self._running) >= self._max_at_once:
                raise OverloadedError(_RETRY_AFTER_S)
            loop = asyncio.get_running_loop()
            # Not of a pool: the interpreter would wait for it at its end.
            thread = threading.Thread(target=self._look_up, args=(loop, key), name="resolver", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads
                raise OverloadedError(_RETRY_AFTER_S) from None
            running = self._running[key] = loop.create_future()  # before the thread's answer, which this loop takes
        async with asyncio.timeout(self._limit_s):
            outcome = await asyncio.shield(running)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _look_up(self, loop: asyncio.AbstractEventLoop, key: tuple[str, int]) -> None:
        outcome: _Outcome
        try:
            found = socket.getaddrinfo(*key, type=socket.SOCK_STREAM)
            outcome = list(dict.fromkeys(str(address[0]) for *_, address in found))
        except Exception as error:
            outcome = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._end, key, outcome)

    def _end(self, key: tuple[str, int], outcome: _Outcome) -> None:
        running = self._running.pop(key)
        if not running.done():
            running.set_result(outcome)
