"""The hub: with `hub_cache` and `hub_errors` the only files that speak to huggingface_hub.

The library resolves names, fetches files (by Xet where the hub offers it) and lays out the cache. It does not compare
checksums over plain HTTP, and takes any ETag for the name of a file: both are checked here.
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
    """The process is about to end, or another file has failed."""


class Meter(Protocol):
    """Told what becomes of a file's bytes, from the thread that fetches it."""

    def received(self, num_bytes: int) -> None:
        """They came over the network."""

    def found(self, num_bytes: int) -> None:
        """They were there; negative: they had to be thrown away."""


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A model repository at one commit. `sizes`: bytes of each file, by its path; None where the hub does not say."""

    commit: str
    sizes: Mapping[str, int | None]


class Hub(Protocol):
    """What the download needs of a model repository. `model_id` and `revision` are the hub's words."""

    @property
    def is_offline(self) -> bool:
        """Whether the user asked never to use the network (HF_HUB_OFFLINE)."""
        ...

    def repository(self, model_id: str, revision: str | None) -> Repository:
        """What is there at `revision`. Raises Unreachable, or Refused for what no retry fixes."""
        ...

    def remove_partial_files(self, model_id: str) -> None:
        """Removes what killed downloads of the model have left in the cache."""
        ...

    def fetch(self, model_id: str, file: str, commit: str, meter: Meter) -> Path:
        """Bring one file into the cache and return its path there.

        Raises as `repository`, OSError for what is wrong with the disk, and Stopped.
        """
        ...


class HuggingFaceHub:
    """The real one. `stop`: when set, transfers end at the next byte; files that are whole are kept."""

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
    """The bytes of one file, as its thread reports them to a meter."""

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
    """Whether the file is the one that the ETag names: the sha256 of files in LFS, git's name of all others.

    Raises Stopped.
    """
    digests = _digests(etag, path.stat().st_size)
    with path.open("rb") as file:
        while digests and (piece := file.read(_READ_BYTES)):
            for digest in digests:
                digest.update(piece)
            if stop.is_set():
                raise Stopped
    return not digests or etag in {digest.hexdigest() for digest in digests}


def _digests(etag: str, size: int) -> list[Any]:
    """What the ETag may be of a file of `size` bytes; none for mirrors that make up their own."""
    if re.fullmatch(r"[0-9a-f]{64}", etag):
        return [hashlib.sha256()]
    if re.fullmatch(r"[0-9a-f]{40}", etag):
        # git's name of the blob; some mirrors give the digest of the bytes alone.
        name = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        return [name, hashlib.sha1(usedforsecurity=False)]
    return []
