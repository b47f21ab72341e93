"""A digest of an adapter, by which machines compare their folders."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from model_server.adapters.folder import Adapter
from model_server.errors import StartupError
from wire.lora.merged import ADAPTER_CONFIG
from wire.model_files import open_regular

_CHUNK = 2**20


def content_digest(adapter: Adapter, *, whole: bool) -> bytes:
    """Hash config and headers, and the numbers too if `whole`."""
    found = hashlib.sha256()
    for file, header in sorted(adapter.headers.items()):
        found.update(_digest(file.parent / ADAPTER_CONFIG, None))
        found.update(_digest(file, None if whole else min((t.begin for t in header.tensors.values()), default=None)))
    return found.digest()


def _digest(file: Path, length: int | None) -> bytes:
    """Hash the first bytes, or all."""
    found = hashlib.sha256()
    for chunk in _chunks(file, length):
        found.update(chunk)
    return found.digest()


def _chunks(file: Path, length: int | None) -> Iterator[bytes]:
    with open_regular(file, StartupError) as opened:
        while chunk := opened.read(_CHUNK if length is None else min(_CHUNK, length)):
            yield chunk
            length = None if length is None else length - len(chunk)
