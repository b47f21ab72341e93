"""How gRPC waits for its sockets. Called by both ends before they import it."""

from __future__ import annotations

import os

_VARIABLE = "GRPC_EXPERIMENTS"
_IN_PLACE = "-event_engine_client,-event_engine_listener"


def poll_in_place() -> None:
    """The thread that waits for a call's end also reads the socket, as gRPC did before its event engine.

    The engine hands every event through a pool of threads: eight more wake-ups a call, which on few cores come at the
    cost of the threads that compute. Measured: 640 instead of 1,070 us of CPU for a small call, both ends together. An
    operator's own `GRPC_EXPERIMENTS` is left alone.
    """
    os.environ.setdefault(_VARIABLE, _IN_PLACE)
