"""TLS between a group's nodes, with certificates of its own CA."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

NODE_NAME = "tercet-node"
"""The DNS name in every node's certificate: nodes have no names of their own, and their addresses change."""


@dataclass(frozen=True, kw_only=True)
class MutualTls:
    """PEM files: this node's certificate, its key, and the certificate of the CA."""

    cert: Path
    key: Path
    ca: Path

    @classmethod
    def of(cls, cert: Path | None, key: Path | None, ca: Path | None) -> MutualTls | None:
        """Return the files, if all are given."""
        return None if cert is None or key is None or ca is None else cls(cert=cert, key=key, ca=ca)

    def of_server(self) -> Any:
        """Credentials. Raises OSError."""
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        return grpc.ssl_server_credentials([pair], root_certificates=self.ca.read_bytes(), require_client_auth=True)

    def of_channel(self) -> Any:
        """Credentials. Raises OSError."""
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes())


def open_port(server: Any, target: str, tls: MutualTls | None) -> None:
    """Has a gRPC server listen. Raises RuntimeError if it cannot."""
    if tls is None:
        server.add_insecure_port(target)
    else:
        server.add_secure_port(target, tls.of_server())


def open_channel(library: Any, target: str, tls: MutualTls | None, options: Any) -> Any:
    """A channel of `library`: grpc or grpc.aio."""
    if tls is None:
        return library.insecure_channel(target, options=options)
    named = (*options, ("grpc.ssl_target_name_override", NODE_NAME))
    return library.secure_channel(target, tls.of_channel(), options=named)
