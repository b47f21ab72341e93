"""Adapters that are loaded and dropped while the model serves; each has a number while a request has it."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from model_server.adapters.folder import Adapter
from model_server.errors import StartupError
from wire.lora.merged import ADAPTER_CONFIG
from wire.model_files import open_regular

logger = logging.getLogger(__name__)

_CHUNK = 2**20
MOST_RESIDENT = 256
"""Adapters of one model at once; a place costs little more than a pointer for each of its matrices."""


class Sites(Protocol):
    """The parts of a model that adapters change."""

    def check(self, adapter: Adapter) -> None:
        """Refuse what can be refused before reading."""

    def read(self, adapter: Adapter) -> Any:
        """Read this rank's part, which has `nbytes`."""

    def put(self, number: int, loaded: Any) -> None:
        """Apply it from now on to rows with that number."""

    def remove(self, number: int) -> None:
        """The number is free again."""


@dataclass(frozen=True, slots=True)
class Size:
    """The memory, largest rank and digest of an adapter."""

    num_bytes: int
    rank: int
    # Empty: none was asked for.
    digest: bytes = b""


class Residence:
    """A loaded adapter; its number stays its own while this is referenced."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class Residents:
    """The adapters on this rank. Thread-safe: loading runs beside steps."""

    def __init__(
        self,
        sites: Sites,
        numbers: range,
        root: Path,
        read: Callable[[str, Path], Adapter],
        itemsize: int,
        *,
        digests: bool = False,
    ) -> None:
        """Take the numbers that adapters may get.

        Args:
            root: Folders outside of it are not read.
            itemsize: Bytes of a number of the model.
            digests: Other machines must have equal folders.
        """
        self._sites = sites
        self._free = deque(numbers)
        self._root = root.resolve()
        self._read = read
        self._itemsize = itemsize
        self._digests = digests
        self._by_id: dict[int, Residence] = {}
        self._num_clears = 0
        self._lock = threading.Lock()  # one at a time is read, so that no two need memory at once

    def check(self, name: str, path: str) -> Size:
        """Estimate what all ranks keep of it, without loading.

        Raises:
            StartupError: One line that names the adapter.
        """
        adapter = self._checked(name, path)
        self._sites.check(adapter)
        return Size(adapter.num_kept * self._itemsize, adapter.rank, self._digest(adapter, whole=False))

    def load(self, load_id: int, name: str, path: str) -> Size:
        """Load it for requests under `load_id`."""
        num_clears = self._num_clears
        adapter = self._checked(name, path)
        digest = self._digest(adapter, whole=True)
        with self._lock:
            if load_id in self._by_id:
                raise StartupError(f"LoRA adapter `{name}`: the load id {load_id} is taken")
            try:
                loaded = self._sites.read(adapter)
            except StartupError as error:
                raise adapter.named(error) from None
            if not self._free:
                raise StartupError(f"LoRA adapter `{name}`: {MOST_RESIDENT} adapters are in use; try again later")
            number = self._free.popleft()
            residence = Residence(number)
            weakref.finalize(residence, self._remove, number, name)  # also if what follows fails
            self._sites.put(number, loaded)
            self._by_id[load_id] = residence
            if num_clears != self._num_clears:
                # Its router is gone and drops it no more; the next one gives the same ids again.
                self.drop(load_id)
                raise StartupError(f"LoRA adapter `{name}`: another router has connected meanwhile")
        logger.debug("LoRA adapter `%s` is loaded under %d: %d bytes", name, load_id, loaded.nbytes)
        return Size(loaded.nbytes, adapter.rank, digest)

    def drop(self, load_id: int) -> None:
        """Forget a load id, known or not; its memory goes with the last request."""
        self._by_id.pop(load_id, None)

    def clear(self) -> None:
        """Drop all, also what is being loaded."""
        self._num_clears += 1
        self._by_id.clear()

    def find(self, load_id: int) -> Residence | None:
        """Return what a request holds to have the adapter, if loaded."""
        return self._by_id.get(load_id)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def _checked(self, name: str, path: str) -> Adapter:
        folder = Path(os.path.realpath(self._root / path))
        if not folder.is_relative_to(self._root):
            raise StartupError(f"LoRA adapter `{name}`: {path:.200} leads out of --lora-root")
        try:
            return self._read(name, folder)
        except StartupError as error:  # for clients, who know names below the root only
            raise StartupError(str(error).replace(f"{folder}{os.sep}", "").replace(str(folder), "its folder")) from None
        except OSError as error:
            raise StartupError(f"LoRA adapter `{name}`: its files cannot be read: {error.strerror}") from None

    def _digest(self, adapter: Adapter, *, whole: bool) -> bytes:
        return _content_digest(adapter, whole=whole) if self._digests else b""

    def _remove(self, number: int, name: str) -> None:
        # On the thread that let go of it last, without the lock: that thread may hold it.
        self._sites.remove(number)
        self._free.append(number)
        logger.debug("LoRA adapter `%s` has left", name)


def _content_digest(adapter: Adapter, *, whole: bool) -> bytes:
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
