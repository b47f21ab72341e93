"""The stacks of all threads on standard error, on a signal: they show what a process that hangs is doing.

The dump is written in the signal handler itself, by C code that takes no locks: it works while the interpreter waits in
a collective, in a driver or for its own lock. Not for a process that is stopped, or that the kernel holds in a call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys

SIGNAL = signal.SIGUSR1
"""A launcher starts its children with this signal ignored, so that one that is not ready for it yet does not die."""


def answer_requests() -> None:
    """From now on SIGNAL prints all stacks, and so does a crash in native code before it ends the process."""
    if sys.__stderr__ is None:
        return
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed
        faulthandler.register(SIGNAL, file=sys.__stderr__, all_threads=True, chain=False)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=sys.__stderr__, all_threads=True)
