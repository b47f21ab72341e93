"""Certificates of the nodes of a group."""

from __future__ import annotations

from pathlib import Path

import trustme

from wire.rpc.mutual_tls import NODE_NAME, MutualTls


def certificates(folder: Path, name: str = NODE_NAME) -> MutualTls:
    """A certificate for `name` by an authority of its own, in `folder`, which is made."""
    folder.mkdir()
    authority = trustme.CA()
    mine = authority.issue_cert(name)
    paths = MutualTls(cert=folder / "cert.pem", key=folder / "key.pem", ca=folder / "ca.pem")
    mine.cert_chain_pems[0].write_to_path(paths.cert)
    mine.private_key_pem.write_to_path(paths.key)
    authority.cert_pem.write_to_path(paths.ca)
    return paths
