"""The stand-in CUDA runtime of this process: its counters, its log, its queues."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

library = ctypes.CDLL("libcudart.so.13")
library.card_queue_number.argtypes = [ctypes.c_void_p, ctypes.c_long]
library.card_spoil.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
library.card_counter.restype = ctypes.c_long
library.card_set_order.argtypes = [ctypes.c_char_p]
library.card_log.argtypes = [ctypes.c_char_p, ctypes.c_char_p]


class Counter(IntEnum):
    """What is counted, in the order of libraries/fake_card.h, which says more."""

    LAUNCHES = 0
    COMPUTED = 1
    EARLY_LAUNCHES = 2
    GRAPH_LAUNCHES = 3
    COPIES = 4
    COPIED_BYTES = 5
    FILLS = 6
    DEVICE_ALLOCATIONS = 7
    PINNED_ALLOCATIONS = 8
    PAGEABLE_UPLOADS = 9
    WAITING_COPIES = 10
    STREAM_WAITS = 11
    EVENT_WAITS = 12
    FORBIDDEN = 13
    OUTSIDE_CAPTURE = 14
    CHANGED_SOURCES = 15
    CHANGED_TARGETS = 16
    PARTED_RANKS = 17


FAULTS = (
    Counter.FORBIDDEN, Counter.OUTSIDE_CAPTURE, Counter.CHANGED_SOURCES, Counter.CHANGED_TARGETS, Counter.PARTED_RANKS,
)  # fmt: skip

Counts = dict[Counter, int]


def counts() -> Counts:
    """Every counter since the process began."""
    return {counter: int(library.card_counter(int(counter))) for counter in Counter}


@contextmanager
def counted() -> Iterator[Counts]:
    """What each counter grows by inside; known at the end."""
    before, grown = counts(), dict.fromkeys(Counter, 0)
    try:
        yield grown
    finally:
        grown.update({counter: number - before[counter] for counter, number in counts().items()})


def faults(grown: Counts) -> dict[str, int]:
    """Those that are not 0, by name."""
    return {counter.name: grown[counter] for counter in FAULTS if grown[counter]}


def log_calls(on: bool) -> None:
    """Whether calls are written to the file FAKE_CARD_LOG."""
    library.card_set_logging(int(on))


def log_line(text: str) -> None:
    """Write a line of one's own there."""
    library.card_log(b"MARK %s", text.encode())


def set_order(order: str) -> None:
    """`late`, or `random:SEED` (libraries/streams.c)."""
    library.card_set_order(order.encode())


# What the runtime calls with a number whose turn has come: kept, since the runtime does not hold it.
_Runner = ctypes.CFUNCTYPE(None, ctypes.c_long)
_runner: ctypes._FuncPointer | None = None


def set_runner(run: Callable[[int], None]) -> None:
    """From now on `run` is called for each queued number, on the thread that waits."""
    global _runner
    _runner = _Runner(run)
    library.card_set_runner(_runner)
