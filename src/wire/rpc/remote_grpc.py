"""gRPC between two nodes: how long a silent connection is kept, and the secret that each call carries."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

_KEEPALIVE_MS = 5_000

NO_PROXY = (("grpc.enable_http_proxy", 0),)
"""Options of a channel."""
ONE_LISTENER = (("grpc.so_reuseport", 0),)
"""Options of a server: a port that another process has is an error; gRPC would otherwise share it."""

PINGED = (
    *ONE_LISTENER,
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
)
"""Options of a server whose channels have those of `pinging`."""


def pinging(lease_s: float) -> tuple[tuple[str, int], ...]:
    """Options of a channel whose calls fail if nothing comes from the other side for `lease_s`."""
    return (
        *NO_PROXY,
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", int(lease_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


UNIX, TCP = "unix://", "tcp://"
"""How the address of a shard or of a node's endpoint begins."""

_KEY, _SCHEME = "authorization", "Bearer "


def token_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """What a call carries; nothing in a group without a token."""
    return ((_KEY, _SCHEME + token),) if token else ()


def is_allowed(metadata: Iterable[tuple[str, str | bytes]] | None, token: str | None) -> bool:
    """Whether a call with this metadata comes from a member of the group."""
    if not token:
        return True
    given = dict(metadata or ()).get(_KEY)
    return isinstance(given, str) and hmac.compare_digest(given.encode(), (_SCHEME + token).encode())


def host_and_port(address: str, port: int) -> str:
    """Spell for gRPC and URLs: IPv6 in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def grpc_target(url: str) -> str:
    """`unix://<path>`, a bare path, or `tcp://<address>:<port>` as gRPC names it."""
    return url.removeprefix(TCP) if url.startswith(TCP) else "unix:" + url.removeprefix(UNIX)
