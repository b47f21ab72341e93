"""The unix sockets of the shards of one node."""

from __future__ import annotations

import os
from pathlib import Path

from model_server.errors import StartupError
from wire.processes import unix_socket


def socket_path(prefix: Path, rank: int) -> Path:
    return Path(f"{prefix}-{rank}")


def claim_socket(path: Path) -> None:
    """Replace a stale socket, and nothing else."""
    if len(os.fsencode(path)) > unix_socket.LONGEST_PATH:
        raise StartupError(
            f"the socket path {path} is longer than {unix_socket.LONGEST_PATH} bytes; shorten --shard-uds-path"
        )
    try:
        unix_socket.make_way(str(path))
    except unix_socket.PathTakenError as error:
        raise StartupError(f"{error}; choose another --shard-uds-path") from None
