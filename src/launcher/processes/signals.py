"""Signals as something to wait for: requests to stop or to read files again, and exits of children, in one place."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from types import FrameType, TracebackType
from typing import Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO_S = 0.3
"""The same signal within this time is the same request: `timeout` signals a process and then its whole group."""


class Signals:
    """Owns the process' handlers while it is entered on the main thread; else only `notify` feeds it."""

    def __init__(self) -> None:
        self.received: list[int] = []
        """Every request to stop so far, oldest first."""
        self._num_taken = 0
        self._reads_again = False
        self._received_at = 0.0
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._previous: dict[int, object] = {}
        self._previous_wakeup = -1

    def __enter__(self) -> Self:
        self._previous_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            # As nohup asks: a hang-up that is ignored at start stays ignored.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_stop)
        self._previous[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, self._on_change)
        # The handler does nothing: with it, the death of a child writes to the pipe and ends a wait.
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self.close()

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)

    def notify(self, number: int) -> None:
        """Act as if the signal had been received."""
        self._on_stop(number, None)
        os.write(self._write, b"\0")

    def wake(self) -> None:
        """Ends a wait. May be called on any thread."""
        with contextlib.suppress(OSError):  # full: it ends anyway; closed: nothing waits any more
            os.write(self._write, b"\0")

    def wait(self, timeout_s: float) -> None:
        """Until a signal (a child's death is one) or the time is over."""
        readable, _, _ = select.select([self._read], [], [], max(0.0, timeout_s))
        if readable:
            os.read(self._read, 4096)

    def pop(self) -> bool:
        """Whether there is a request to stop that has not been acted on; each is taken once."""
        has_more = len(self.received) > self._num_taken
        self._num_taken += has_more
        return has_more

    @property
    def remark(self) -> str:
        """Return what a further request to stop does."""
        again = "Ctrl-C" if signal.SIGINT in self.received else "signal"
        return f"a second {again} ends everything now"

    def pop_change(self) -> bool:
        """Whether SIGUSR2 has said, since the last call, that files have changed."""
        changed, self._reads_again = self._reads_again, False
        return changed

    def _on_change(self, number: int, frame: FrameType | None) -> None:
        self._reads_again = True

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received or self.received[-1] != number or now - self._received_at >= ECHO_S:
            self.received.append(number)
            self._received_at = now
