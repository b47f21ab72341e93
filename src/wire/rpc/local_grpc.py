"""gRPC between two processes of one machine, tuned alike at both ends."""

from __future__ import annotations

import os

_VARIABLE = "GRPC_EXPERIMENTS"
_IN_PLACE = "-event_engine_client,-event_engine_listener"

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # No pings that measure the path for every message: a unix socket has no bandwidth to find out. Without them a
    # stream's window keeps the size that it has at first.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 * 1024 * 1024),
)
"""Of a channel and of a server."""


def poll_in_place() -> None:
    """Let the waiting thread read the socket, as before gRPC's event engine; before gRPC is imported."""
    # The engine hands every event through a pool of threads: eight more wake-ups a call, which on few cores come at the
    # cost of the threads that compute. Measured: 640 instead of 1,070 us of CPU for a small call, both ends together.
    # An operator's own `GRPC_EXPERIMENTS` is left alone.
    os.environ.setdefault(_VARIABLE, _IN_PLACE)
