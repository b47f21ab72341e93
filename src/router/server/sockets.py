"""Listening sockets, and how many connections the limit of open files allows."""

from __future__ import annotations

import ipaddress
import logging
import resource
import socket

from router.errors import StartupError

logger = logging.getLogger(__name__)

RESERVED_FILES = 128
"""Open files other than connections of clients: shards, log, metrics port, worker processes."""

FILES_OF_IMAGES = 4096
"""More of them, where the system lets this process have as many: each large image that is kept is one."""

_BACKLOG = 2048
# The kernel would buffer megabytes for a client that does not read; this is plenty for a stream of tokens.
_SEND_BUFFER_BYTES = 128 * 1024


def bind(hostname: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises StartupError that names the port."""
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


def listen(listener: socket.socket) -> None:
    """Two sockets may be bound to one port until one of them listens; asyncio's loop would say nothing of the other's
    failure. Raises StartupError that names the port."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        address, port = listener.getsockname()[:2]
        raise _cannot_listen(address, port, error) from None


def warn_without_key(listener: socket.socket) -> None:
    """Says, where no API key is demanded, who will be served, unless that is this machine alone."""
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
    """Raises this process' limit of open files for this many connections; returns how many there may be.

    Every connection is an open file, and the usual limit of a login shell is 1024.
    """
    wanted = num_connections + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted + FILES_OF_IMAGES
    if soft != resource.RLIM_INFINITY and soft < most and soft != hard:
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return num_connections
    allowed = max(soft - RESERVED_FILES, 1)
    logger.warning(
        "--max-connections %d: the limit of %d open files allows %d connections", num_connections, soft, allowed
    )
    return allowed
