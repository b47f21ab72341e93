"""Command: what planning hands to the code that starts processes; and how the launcher asks its own server."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

Environment = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Command:
    """How to start one child, and how to know that it is ready."""

    name: str
    """`download`, `shard` or `router`."""
    argv: tuple[str, ...]
    env: Environment
    rank: int | None = None
    replica: int | None = None
    """Which copy of the model a shard is of, where there are several."""
    socket: str | None = None
    """Ready when gRPC Health is answered here."""
    url: str | None = None
    """Of an HTTP server: ready when it answers GET /health with 200."""
    model: str = ""
    """Whose it is, where there are several models."""
    private_files: bool = False
    """Only its user may read files that it creates (the mode of a socket follows from this)."""

    @property
    def title(self) -> str:
        title = self.name if self.rank is None else f"{self.name} {self.rank}"
        title += "" if self.replica is None else f" of replica {self.replica}"
        return f"{title} of {self.model}" if self.model else title


_UNIX = "unix:"


def unix_url(path: Path) -> str:
    """Return how HTTP on a unix socket is written here."""
    return f"{_UNIX}{path}"


def unix_path(url: str) -> str | None:
    """Return the socket of such a URL; None for any other."""
    return url.removeprefix(_UNIX) if url.startswith(_UNIX) else None


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def url_of(address: str, port: int, *, has_tls: bool) -> str:
    """address: an IP address; `0.0.0.0` and `::`, all of this machine's, become the loopback address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"{'https' if has_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def connection_to(url: str, timeout_s: float) -> http.client.HTTPConnection:
    """Not connected yet. The certificate is not checked: it is made for the names that clients use."""
    path = unix_path(url)
    if path is not None:
        return _UnixConnection(path, timeout_s)
    parts = urlsplit(url)
    assert parts.hostname is not None
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    import ssl  # 10 ms, for those who use it

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)
