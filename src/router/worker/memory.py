"""Memory that large work leaves behind, given back to the system."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3  # <malloc.h>
_LARGE = 256 << 10


def give_back() -> None:
    """After work that took hundreds of megabytes and has let go of them: glibc keeps what a thread has freed.

    Takes some hundredths of a second, only of the calling thread. Does nothing with other C libraries.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_no_large_blocks() -> None:
    """From now on blocks of 256 KiB and more go back to the system when they are freed, in every thread.

    For servers whose requests have megabytes: glibc raises that limit to the largest block that was ever freed, up to
    32 MiB, and each thread then keeps as much. Does nothing with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
