"""All threads' stacks on standard error, on a signal.

Written in the handler by C code without locks, so also while the interpreter waits in a collective or driver; not for
stopped processes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys

SIGNAL = signal.SIGUSR1
"""A launcher starts its children with this signal ignored, so that one that is not ready for it yet does not die."""


def answer_requests() -> None:
    """Print all stacks on SIGNAL and native crashes from now on."""
    if sys.__stderr__ is None:
        return
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed
        faulthandler.register(SIGNAL, file=sys.__stderr__, all_threads=True, chain=False)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=sys.__stderr__, all_threads=True)
