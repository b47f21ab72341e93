"""Listening sockets, and the limit of open files."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from router.config import RouterConfig
from router.errors import StartupError
from wire.processes.open_files import raise_open_files
from wire.processes.unix_socket import PathTakenError, make_way

logger = logging.getLogger(__name__)

RESERVED_FILES = 128
"""Open files other than connections of clients: shards, log, metrics port, worker processes."""

FILES_OF_IMAGES = 4096
"""More of them, where the system lets this process have as many: each large image that is kept is one."""

_FEW_IMAGES = 64

_BACKLOG = 2048
# The kernel would buffer megabytes for a client that does not read; this is plenty for a stream of tokens.
_SEND_BUFFER_BYTES = 128 * 1024


def bind(hostname: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet."""
    try:
        address = ipaddress.ip_address(hostname)
    except ValueError:
        logger.warning("Invalid hostname %r, defaulting to 0.0.0.0", hostname)
        address = ipaddress.ip_address("0.0.0.0")
    listener = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # inherited by its connections
    try:
        listener.bind((str(address), port))
    except OSError as error:
        listener.close()
        raise _cannot_listen(address, port, error) from None
    listener.setblocking(False)
    return listener


def bind_path(path: Path, mode: int) -> socket.socket:
    """Return a bound unix socket that does not listen yet; a stale one of this user is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        make_way(str(path))
        listener.bind(str(path))
        os.chmod(path, mode)
    except PathTakenError as error:
        listener.close()
        raise StartupError(f"cannot listen on `--uds`: {error}") from None
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on {path}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


@contextlib.contextmanager
def http_listener(config: RouterConfig) -> Iterator[socket.socket]:
    """Bind the port or `--uds`, whose file goes with it."""
    if config.uds is None:
        with bind(config.hostname, config.listening_port) as listener:
            yield listener
        return
    with bind_path(config.uds, int(config.uds_mode, 8)) as listener:
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                config.uds.unlink()


def listen(listener: socket.socket) -> None:
    """Listen, raising what asyncio's loop would hide if another socket on the port does."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        address, port = listener.getsockname()[:2]
        raise _cannot_listen(address, port, error) from None


def warn_without_key(listener: socket.socket) -> None:
    """Warn of whom a server without a key serves, unless local."""
    if listener.family == socket.AF_UNIX:
        return
    address, port = listener.getsockname()[:2]
    if not ipaddress.ip_address(address).is_loopback:
        logger.warning(
            "no API key: every client that reaches port %d of %s is served; set one with --api-key (API_KEY), or serve "
            "only this machine with --hostname 127.0.0.1",
            port,
            address,
        )


def _cannot_listen(address: object, port: int, error: OSError) -> StartupError:
    return StartupError(f"cannot listen on {address}:{port}: {error.strerror}")


def allow_connections(num_connections: int) -> int:
    """Raise the limit of open files (usually 1024) for connections; return how many."""
    limit = _limit(num_connections)
    allowed = num_connections if limit is None else limit - _reserved(limit)
    if allowed >= num_connections:
        return num_connections
    logger.warning(
        "--max-connections %d: the limit of %d open files allows %d connections", num_connections, limit, allowed
    )
    return allowed


def allow_images(num_connections: int) -> int:
    """Return how many large images may share memory beside connections, a few at the limit."""
    limit = _limit(num_connections)
    if limit is None:
        return FILES_OF_IMAGES
    spare = limit - _reserved(limit)
    allowed = min(max(spare - num_connections, spare // 8), FILES_OF_IMAGES)
    if allowed < _FEW_IMAGES:
        logger.warning(
            "the limit of %d open files allows %d large images in memory that the model server shares; it is sent the "
            "others, which takes longer: raise the limit (ulimit -n)",
            limit,
            allowed,
        )
    return allowed


def _limit(num_connections: int) -> int | None:
    return raise_open_files(num_connections + RESERVED_FILES + FILES_OF_IMAGES)


def _reserved(limit: int) -> int:
    """Return the files always open, about 30."""
    return min(RESERVED_FILES, limit * 5 // 8)
