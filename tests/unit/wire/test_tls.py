"""What is wrong with a certificate and its key, in one line each."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from wire import tls


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    mine, other = authority.issue_cert("localhost"), authority.issue_cert("localhost")
    mine.cert_chain_pems[0].write_to_path(path / "cert.pem")
    mine.private_key_pem.write_to_path(path / "key.pem")
    mine.private_key_and_cert_chain_pem.write_to_path(path / "both.pem")
    other.private_key_pem.write_to_path(path / "other.pem")
    key = load_pem_private_key(mine.private_key_pem.bytes(), None)
    encryption = BestAvailableEncryption(b"secret")
    (path / "encrypted.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    (path / "text.pem").write_text("no certificate")
    return path


@pytest.mark.parametrize(("certfile", "keyfile"), [("cert.pem", "key.pem"), ("both.pem", None), (None, None)])
def test_what_can_be_used(folder: Path, certfile: str | None, keyfile: str | None) -> None:
    tls.check(certfile and folder / certfile, keyfile and folder / keyfile)


@pytest.mark.parametrize(
    ("certfile", "keyfile", "reason"),
    [
        (None, "key.pem", "`--ssl-keyfile` needs `--ssl-certfile`"),
        ("none.pem", None, "`--ssl-certfile` .*none.pem: No such file"),
        ("cert.pem", "none.pem", "`--ssl-keyfile` .*none.pem: No such file"),
        ("cert.pem", None, "no certificate and key in PEM form can be read from it$"),
        ("text.pem", "key.pem", "no certificate and key in PEM form can be read from it and `--ssl-keyfile` .*key.pem"),
        ("cert.pem", "other.pem", "its key is not the one that is given"),
        ("cert.pem", "encrypted.pem", "is encrypted; decrypt it: openssl"),
    ],
)
def test_what_cannot(folder: Path, certfile: str | None, keyfile: str | None, reason: str) -> None:
    with pytest.raises(tls.TlsError, match=reason):
        tls.check(certfile and folder / certfile, keyfile and folder / keyfile)


def test_an_authority(folder: Path) -> None:
    tls.check_authority("--group-tls-ca", folder / "cert.pem")
    with pytest.raises(tls.TlsError, match=r"`--group-tls-ca` .*text.pem: no certificate in PEM form can be read"):
        tls.check_authority("--group-tls-ca", folder / "text.pem")
    with pytest.raises(tls.TlsError, match=r"`--group-tls-ca` .*none.pem: No such file"):
        tls.check_authority("--group-tls-ca", folder / "none.pem")
