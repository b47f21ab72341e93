"""The launcher's side of the front: lines of JSON on a unix socket, read by a thread.

To the front: `models` (all states), `release` (a name), `done` (a number and an error). From it: `listening`, `usage`
(name → running, waiting, idle seconds), `released` and `kept` (a name), `load` and `unload` (a name and a number).
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SEND_TIMEOUT_S = 10.0
_READ_BYTES = 64 * 1024


class Control:
    """Listens for the front, which connects once."""

    def __init__(self, path: Path, wake: Callable[[], None]) -> None:
        """Listen at a path of a private folder.

        Args:
            wake: Called on another thread when there is something to read.
        """
        self.path = path
        self._wake = wake
        self._received: deque[dict[str, Any]] = deque()
        self._front: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(1)
        threading.Thread(target=self._read, name="front", daemon=True).start()

    def receive(self) -> list[dict[str, Any]]:
        """Return what has come since the last call."""
        messages = []
        while self._received:
            messages.append(self._received.popleft())
        return messages

    def send(self, **message: Any) -> None:
        """Write to the front if it has connected; at its end nothing is lost."""
        if self._front is not None:
            with contextlib.suppress(OSError):
                self._front.sendall(json.dumps(message).encode() + b"\n")

    @property
    def is_connected(self) -> bool:
        return self._front is not None

    def close(self) -> None:
        for one in filter(None, (self._front, self._listener)):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            front, _ = self._listener.accept()
            front.settimeout(None)
            front.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, int(_SEND_TIMEOUT_S).to_bytes(8, "little") + bytes(8)
            )
            self._front = front
            self._put({"connected": True})
            with front.makefile("rb", buffering=_READ_BYTES) as lines:
                for line in lines:
                    self._put(json.loads(line))

    def _put(self, message: dict[str, Any]) -> None:
        self._received.append(message)
        self._wake()
