"""A worker's inside: bounds, then an answer for each frame until the pipe closes."""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import BinaryIO

from wire.worker.frames import frame, limit_and_data, read_frame


def serve(answer: Callable[[bytes, float], bytes], *, memory_limit: int, cpu_limit_s: int) -> None:
    """Answer frame by frame.

    Args:
        answer: Gets data and a limit in seconds; returns LATE beyond.
        memory_limit: Bytes of address space.
        cpu_limit_s: Of one frame, for when the router is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the router's
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    reply = b""  # "ready"
    while True:
        replies.write(frame(reply))
        replies.flush()
        try:
            asked = read_frame(partial(_read_exactly, requests))
        except EOFError:
            return
        _allow_cpu_time(cpu_limit_s)
        limit_s, data = limit_and_data(asked)
        reply = answer(data, limit_s)


def _read_exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _allow_cpu_time(seconds: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    allowed = int(time.process_time()) + seconds
    if hard == resource.RLIM_INFINITY or allowed < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (allowed, hard))
