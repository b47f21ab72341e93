"""A text stream that never blocks its writers: late or closed, it drops and counts whole writes."""

from __future__ import annotations

import io
import os
import threading
import time
from collections import deque
from datetime import UTC, datetime

from wire.log.log_line import LogLine, to_json

_BUFFER_BYTES = 8 * 1024 * 1024


def claim_standard_descriptors() -> None:
    """Open closed standard descriptors on /dev/null: else the next opened file gets what is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one


class Output(io.TextIOBase):
    """Writes to `descriptor`, which stays the caller's."""

    def __init__(self, descriptor: int, *, buffer_bytes: int = _BUFFER_BYTES, json_lines: bool = False) -> None:
        """`json_lines`: the record of dropped writes is JSON, as all others are."""
        super().__init__()
        self._json_lines = json_lines
        self._descriptor = descriptor
        self._room = buffer_bytes
        self._waiting: deque[bytes] = deque()
        self._dropped = 0
        self._is_broken = False
        self._is_ending = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._drain, name=f"output-{descriptor}", daemon=True)
        self._thread.start()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._is_broken or self._is_ending:
                return len(text)
            if len(data) > self._room:
                self._dropped += 1
                return len(text)
            self._room -= len(data)
            self._waiting.append(data)
            self._changed.notify_all()
        return len(text)

    def finish(self, timeout_s: float) -> None:
        """Ends the stream; what has been written goes out if the reader takes it within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _drain(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_ending)
                if not self._waiting:
                    return
                data = b"".join(self._waiting)
                self._waiting.clear()
            delivered = self._deliver(data)
            with self._changed:
                self._room += len(data)
                if not delivered:
                    self._is_broken = True
                    self._waiting.clear()
                    return
                if self._dropped and not self._waiting:
                    self._waiting.append(self._note().encode())
                    self._room -= len(self._waiting[0])
                    self._dropped = 0

    def _note(self) -> str:
        text = f"{self._dropped} writes dropped: the reader is too slow"
        if not self._json_lines:
            return f"... {text}\n"
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        line = LogLine(level="WARN", message=text, timestamp=now, target="text_generation_launcher")
        return to_json(line, "launcher") + "\n"

    def _deliver(self, data: bytes) -> bool:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view[:65536]) :]
            except BlockingIOError:  # Another process made the terminal non-blocking.
                time.sleep(0.01)
            except OSError:
                return False
        return True
