"""Returns large work's memory to the system."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3  # <malloc.h>
_LARGE = 256 << 10


def give_back() -> None:
    """Return this thread's freed memory (glibc), in hundredths of a second, after hundreds of megabytes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_no_large_blocks() -> None:
    """Return freed blocks from 256 KiB on, in all threads (glibc), which else raises the limit up to 32 MiB each."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
