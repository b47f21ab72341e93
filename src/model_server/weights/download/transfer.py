"""The bytes of one file: from where an earlier try, or an earlier process, left off, to a blob that has been verified.

A partial file is beside its blob as `ETAG.incomplete`, and is kept whatever ends the transfer. No byte for
HF_HUB_DOWNLOAD_TIMEOUT seconds (10) ends a try. The hub's ETag is the sha256 of files in LFS and git's name of all
others: what was received is compared with it, and thrown away if it differs.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from model_server.weights.hub_errors import Unreachable

_READ_BYTES = 2**20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-")


class Stopped(Exception):
    """The process is about to end, or another file has failed."""


class Meter(Protocol):
    """Told what becomes of a file's bytes, from the thread that fetches it."""

    def received(self, num_bytes: int) -> None:
        """They came over the network and are kept."""

    def found(self, num_bytes: int) -> None:
        """They were there; negative: they had to be thrown away."""


class Transfer:
    """One try. For another try the caller makes a new one."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        blob: Path,
        size: int | None,
        meter: Meter,
        stop: threading.Event,
    ) -> None:
        """`blob`: the target, named by the ETag. `size`: None if the hub does not say."""
        self._url, self._headers, self._size = url, headers, size
        self._blob, self._partial = blob, blob.with_name(f"{blob.name}.incomplete")
        self._meter, self._stop = meter, stop
        self._have = 0
        self.has_grown = False
        """Whether this try has received anything that is kept."""

    def run(self) -> None:
        """Raises Unreachable if another try may help, Stopped, OSError, and what huggingface_hub raises."""
        with self._partial.open("ab") as file:
            self._have = file.tell()
            self._meter.found(self._have)
            try:
                if self._size is not None and self._have > self._size:
                    self._start_over(file)
                if self._size is None or self._have < self._size:
                    self._receive(file)
            except BaseException:
                self._meter.found(-self._have)  # the next try counts it again
                raise
        self._verify()
        os.replace(self._partial, self._blob)

    def _receive(self, file: IO[bytes]) -> None:
        from huggingface_hub import constants, get_session
        from huggingface_hub.utils import hf_raise_for_status

        headers = {**self._headers, "Accept-Encoding": "identity"}
        if self._have:
            headers["Range"] = f"bytes={self._have}-"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream(
            "GET", self._url, headers=headers, timeout=timeout, follow_redirects=True
        ) as response:
            if response.status_code == 416:
                self._start_over(file)
                raise Unreachable("the partial file is not a part of what the hub has")
            hf_raise_for_status(response)
            if self._have and not self._continues(response):
                self._start_over(file)
            self._write(file, response)
        if self._size is not None and self._have < self._size:
            raise Unreachable(f"the connection was closed after {self._have} of {self._size} bytes")

    def _continues(self, response: Any) -> bool:
        """Whether the answer continues where we are; a server may send everything instead."""
        match = _CONTENT_RANGE.match(response.headers.get("Content-Range") or "")
        encoding = response.headers.get("Content-Encoding") or "identity"
        return (
            response.status_code == 206
            and match is not None
            and int(match[1]) == self._have
            and (encoding == "identity")
        )

    def _write(self, file: IO[bytes], response: Any) -> None:
        for piece in response.iter_bytes():
            file.write(piece)
            file.flush()  # a killed process loses nothing
            self._have += len(piece)
            self.has_grown = True
            self._meter.received(len(piece))
            if self._stop.is_set():
                raise Stopped
            if self._size is not None and self._have > self._size:
                self._start_over(file)
                raise Unreachable(f"the hub sent more than the {self._size} bytes that the file has")

    def _start_over(self, file: IO[bytes]) -> None:
        file.truncate(0)
        self._meter.found(-self._have)
        self._have, self.has_grown = 0, False

    def _verify(self) -> None:
        """Covers all that is in the partial file, also what another process wrote."""
        digests = _digests(self._blob.name, self._have)
        with self._partial.open("rb") as file:
            while digests and (piece := file.read(_READ_BYTES)):
                for digest in digests:
                    digest.update(piece)
                if self._stop.is_set():
                    raise Stopped
        if digests and self._blob.name not in {digest.hexdigest() for digest in digests}:
            self._partial.unlink(missing_ok=True)
            self._meter.found(-self._have)
            self.has_grown = False
            raise Unreachable("the checksum is not the hub's: what was received is damaged")


def _digests(etag: str, size: int) -> list[Any]:
    """What the ETag may be of a file of `size` bytes; none for mirrors that make up their own."""
    if re.fullmatch(r"[0-9a-f]{64}", etag):
        return [hashlib.sha256()]
    if re.fullmatch(r"[0-9a-f]{40}", etag):
        # git's name of the blob; some mirrors give the digest of the bytes alone.
        name = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        return [name, hashlib.sha1(usedforsecurity=False)]
    return []
