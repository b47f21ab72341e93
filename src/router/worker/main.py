"""The inside of a worker process: bounds, then one answer for each frame, until the router closes the pipe.

Frames are `router.worker.process`'s: 4 bytes of length, then data.
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

_LENGTH_BYTES = 4


def serve(answer: Callable[[bytes], bytes], *, memory_limit: int, cpu_limit_s: int) -> None:
    """Answers frame by frame. `memory_limit` bytes of address space in all; `cpu_limit_s` seconds for one frame.

    The router kills a process that takes too long; the limit on CPU time is for when the router is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the router's
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    reply = b""  # "ready"
    while True:
        replies.write(frame(reply))
        replies.flush()
        asked = read_frame(requests)
        if asked is None:
            return
        _allow_cpu_time(cpu_limit_s)
        reply = answer(asked)


def read_frame(stream: BinaryIO) -> bytes | None:
    """None at the end of the stream."""
    head = stream.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "big")
    data = stream.read(length)
    return data if len(data) == length else None


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def _allow_cpu_time(seconds: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    allowed = int(time.process_time()) + seconds
    if hard == resource.RLIM_INFINITY or allowed < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (allowed, hard))
