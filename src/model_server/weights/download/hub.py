"""The hub; with `hub_cache` and `hub_errors` all that speaks to huggingface_hub.

The library fetches and lays out the cache; checksums over plain HTTP and false ETags are checked here.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from model_server.errors import StartupError
from model_server.weights.hub_cache import cache, discard, entry, is_commit
from model_server.weights.hub_errors import Unreachable, translated

_ETAG = re.compile(r"[\w.+=@-]{1,200}")
_READ_BYTES = 2**20
_LOCK_WAIT_S = 0.01


class Stopped(Exception):
    """The process ends, or another file failed."""


class Meter(Protocol):
    """Counts a file's bytes, on its thread."""

    def received(self, num_bytes: int) -> None:
        """They came over the network."""

    def found(self, num_bytes: int) -> None:
        """Count bytes already there, or negative, thrown away."""


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository at one commit; `sizes` None where unknown."""

    commit: str
    sizes: Mapping[str, int | None]


class Hub(Protocol):
    """What the download needs of a repository."""

    @property
    def is_offline(self) -> bool: ...

    def repository(self, model_id: str, revision: str | None) -> Repository:
        """Return what is at `revision`.

        Raises:
            Unreachable, Refused: No answer, or a final one.
        """
        ...

    def remove_partial_files(self, model_id: str) -> None:
        """Remove remains of killed downloads."""
        ...

    def fetch(self, model_id: str, file: str, commit: str, meter: Meter) -> Path:
        """Bring a file into the cache.

        Raises:
            Unreachable, Refused, Stopped, OSError: The hub, the process, or the disk.
        """
        ...


class HuggingFaceHub:
    """The real one; `stop` ends transfers, keeping whole files."""

    def __init__(self, stop: threading.Event | None = None) -> None:
        self._stop = stop or threading.Event()

    @property
    def is_offline(self) -> bool:
        from huggingface_hub import constants

        return bool(constants.HF_HUB_OFFLINE)

    def repository(self, model_id: str, revision: str | None) -> Repository:
        from huggingface_hub import HfApi, constants

        with translated(model_id, revision):
            api = HfApi(endpoint=constants.ENDPOINT)
            info = api.model_info(
                model_id, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
        sizes = {file.rfilename: file.size for file in info.siblings or ()}
        if info.sha is None or not is_commit(info.sha):
            raise StartupError(f"--model-id {model_id}: {constants.ENDPOINT} names no commit; is HF_ENDPOINT a hub?")
        return Repository(commit=info.sha, sizes=sizes)

    def remove_partial_files(self, model_id: str) -> None:
        from huggingface_hub.utils import WeakFileLock

        for partial in (entry(model_id) / "blobs").glob("*.incomplete"):
            # `ETAG.NUMBER.incomplete`: the process that fetches the file holds this lock.
            lock = cache() / ".locks" / entry(model_id).name / f"{partial.name.split('.')[0]}.lock"
            try:
                lock.parent.mkdir(parents=True, exist_ok=True)
                with WeakFileLock(lock, timeout=_LOCK_WAIT_S):
                    partial.unlink(missing_ok=True)
            except TimeoutError:
                continue

    def fetch(self, model_id: str, file: str, commit: str, meter: Meter) -> Path:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()  # our log carries the progress
        # Each of its tries logs the URL, which may hold a signature. What ends them all is ours to log.
        logging.getLogger("huggingface_hub.file_download").setLevel(logging.ERROR)
        url = hf_hub_url(model_id, file, revision=commit, endpoint=constants.ENDPOINT)
        count = _Count(meter, self._stop)
        try:
            with translated(model_id, commit):
                found = get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT, endpoint=constants.ENDPOINT)
                etag = found.etag or ""
                if not _ETAG.fullmatch(etag) or etag.startswith("."):
                    raise StartupError(f"--model-id {model_id}: the hub gives no usable ETag for {file}: {etag!r:.80}")
                path = Path(
                    hf_hub_download(
                        model_id, file, revision=commit, endpoint=constants.ENDPOINT, tqdm_class=_reporting_to(count)
                    )
                )  # fmt: skip
            if not _is_intact(path, etag, self._stop):
                discard(model_id, path)
                raise Unreachable("the checksum is not the hub's: what was received is damaged")
        except BaseException:
            count.end_at(0)
            raise
        count.end_at(path.stat().st_size)
        return path


class _Count:
    """A file's bytes, for a meter."""

    def __init__(self, meter: Meter, stop: threading.Event) -> None:
        self._meter, self._stop = meter, stop
        self._told = 0

    def received(self, num_bytes: int) -> None:
        """Raises Stopped."""
        self._told += num_bytes
        self._meter.received(num_bytes)
        if self._stop.is_set():
            raise Stopped

    def end_at(self, num_bytes: int) -> None:
        """Whatever was received, so many are there."""
        self._meter.found(num_bytes - self._told)


def _reporting_to(count: _Count) -> type:
    """The library's progress bar, without the bar."""
    from huggingface_hub.utils import tqdm

    class Told(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            count.received(int(n or 0))
            return None

        # Xet asks for these: bytes of the network, which are fewer than those of the file where chunks are known.
        def update_transfer(self, n: float | None = 1) -> None: ...
        def set_transfer_postfix_str(self, s: str = "", refresh: bool = True) -> None: ...

    return Told


def _is_intact(path: Path, etag: str, stop: threading.Event) -> bool:
    """Whether the file is the ETag's: sha256 in LFS, else git's name."""
    digests = _digests(etag, path.stat().st_size)
    with path.open("rb") as file:
        while digests and (piece := file.read(_READ_BYTES)):
            for digest in digests:
                digest.update(piece)
            if stop.is_set():
                raise Stopped
    return not digests or etag in {digest.hexdigest() for digest in digests}


def _digests(etag: str, size: int) -> list[Any]:
    """Return what an ETag may be; none for mirrors' own."""
    if re.fullmatch(r"[0-9a-f]{64}", etag):
        return [hashlib.sha256()]
    if re.fullmatch(r"[0-9a-f]{40}", etag):
        # git's name of the blob; some mirrors give the digest of the bytes alone.
        name = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        return [name, hashlib.sha1(usedforsecurity=False)]
    return []
