"""A benchmark that is asked to end stops the servers that it has started."""

from __future__ import annotations

import signal
import sys
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def exit_on_signals() -> None:
    """SIGTERM, and a terminal that is closed, raise SystemExit, so that `finally` blocks run: by default Python ends
    without them, and a server in a session of its own goes on."""
    for number in _SIGNALS:
        signal.signal(number, _exit)


def _exit(number: int, _: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # a second one would interrupt the stop
    sys.exit(128 + number)
