"""Memory that large work leaves behind, given back to the system."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """After work that took hundreds of megabytes and has let go of them: glibc keeps what a thread has freed.

    Takes some hundredths of a second, only of the calling thread. Does nothing with other C libraries.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
