"""File descriptors: every connection takes one, and the usual limit of a login shell is 1024."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

# For what is no client's connection: shards, log, metrics port, the process that checks grammars.
RESERVE = 128


def allow(num_connections: int) -> int:
    """Raises this process' limit to what so many connections need; returns how many there may be."""
    wanted = num_connections + RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return num_connections
    allowed = max(soft - RESERVE, 1)
    logger.warning(
        "--max-connections %d: the limit of %d open files allows %d connections", num_connections, soft, allowed
    )
    return allowed
