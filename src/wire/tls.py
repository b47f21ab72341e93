"""Certificates and keys: what is wrong with them, before anything is loaded."""

from __future__ import annotations

from os import PathLike

Path = str | PathLike[str]


class TlsError(Exception):
    """The files cannot be used; the text names the option and is for the operator."""


def check(
    certfile: Path | None, keyfile: Path | None, *, flags: tuple[str, str] = ("--ssl-certfile", "--ssl-keyfile")
) -> None:
    """Refuse certificate and key unless both are None or fit; the key may be in `certfile`."""
    if certfile is None:
        if keyfile is not None:
            raise TlsError(f"`{flags[1]}` needs `{flags[0]}`")
        return
    import ssl  # 10 ms, for those who use it

    def refuse_password() -> str:
        raise TlsError(f"the key for `{flags[0]}` is encrypted; decrypt it: openssl pkey -in KEY -out PLAIN_KEY")

    for flag, path in zip(flags, (certfile, keyfile), strict=True):
        if path is not None:
            try:
                open(path, "rb").close()
            except OSError as error:
                raise TlsError(f"`{flag}` {path}: {error.strerror}") from None
    try:
        # Without a function for it OpenSSL would ask for the password on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=refuse_password)
    except ssl.SSLError as error:
        where = "from it" if keyfile is None else f"from it and `{flags[1]}` {keyfile}"
        reason = f"no certificate and key in PEM form can be read {where}"
        if error.reason == "KEY_VALUES_MISMATCH":
            reason = "its key is not the one that is given"
        raise TlsError(f"`{flags[0]}` {certfile}: {reason}") from None


def check_authority(flag: str, path: Path | None) -> None:
    """Raises TlsError unless the file holds the certificate of an authority."""
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:  # ssl.SSLError is one, whose text is OpenSSL's
        reason = "no certificate in PEM form can be read from it" if isinstance(error, ssl.SSLError) else error.strerror
        raise TlsError(f"`{flag}` {path}: {reason}") from None
