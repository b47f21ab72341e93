"""The hub: with `transfer`, `hub_cache` and `hub_errors` the only files that speak to huggingface_hub.

The library resolves names, reads metadata, and lays out the cache. Only the bytes of a file are fetched by `transfer`:
the library's own download drops what it has when it is interrupted, and does not compare checksums.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from model_server.errors import StartupError
from model_server.weights.download.transfer import Meter, Transfer
from model_server.weights.hub_cache import entry, is_commit
from model_server.weights.hub_errors import Unreachable, translated

_ETAG = re.compile(r"[\w.+=@-]{1,200}")
# What the hub itself serves over HTTP; for more there is only Xet, which is the library's business.
_MAX_HTTP_BYTES = 50_000_000_000


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

    def partial_bytes(self, model_id: str) -> int:
        """How much of files that are not complete is in the cache."""
        ...

    def fetch(self, model_id: str, file: str, commit: str, meter: Meter) -> Path:
        """Bring one file into the cache, resuming a partial one, and return its path there.

        Raises as `repository`, OSError for what is wrong with the disk, and Stopped.
        """
        ...


class HuggingFaceHub:
    """The real one. `stop`: when set, transfers end at the next byte; what they have is kept."""

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

    def partial_bytes(self, model_id: str) -> int:
        found = (entry(model_id) / "blobs").glob("*.incomplete")
        # With two dots it is one of the library's own, which is never resumed.
        return sum(path.stat().st_size for path in found if path.name.count(".") == 1)

    def fetch(self, model_id: str, file: str, commit: str, meter: Meter) -> Path:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(model_id, file, revision=commit, endpoint=constants.ENDPOINT)
        with translated(model_id, commit):
            found = get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT, endpoint=constants.ENDPOINT)
            etag = found.etag or ""
            if not _ETAG.fullmatch(etag) or etag.startswith("."):
                raise StartupError(f"--model-id {model_id}: the hub gives no usable ETag for {file}: {etag!r:.80}")
            if self._is_for_the_library(found.size):
                return self._fetch_by_library(model_id, file, commit, meter)
        self._fetch_blob(model_id, url, entry(model_id) / "blobs" / etag, found.size, meter)
        with translated(model_id, commit):
            return self._fetch_by_library(model_id, file, commit)

    def _fetch_blob(self, model_id: str, url: str, blob: Path, size: int | None, meter: Meter) -> None:
        from huggingface_hub.utils import WeakFileLock, build_hf_headers

        blob.parent.mkdir(parents=True, exist_ok=True)
        lock = blob.parents[2] / ".locks" / blob.parents[1].name / f"{blob.name}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        transfer = Transfer(url, build_hf_headers(library_name="tercet"), blob, size, meter, self._stop)
        try:
            # The library's own lock: one process fetches a file, others wait for it.
            with translated(model_id, None), WeakFileLock(lock):
                if blob.exists():
                    meter.found(blob.stat().st_size)
                else:
                    transfer.run()
        except Unreachable as error:
            error.has_progressed = transfer.has_grown
            raise

    def _is_for_the_library(self, size: int | None) -> bool:
        """Xet where there is no other way, or where the user asked for it by its own switch."""
        from huggingface_hub import constants

        wants_xet = constants.HF_XET_HIGH_PERFORMANCE and not constants.HF_HUB_DISABLE_XET
        return bool(wants_xet) or (size or 0) > _MAX_HTTP_BYTES

    def _fetch_by_library(self, model_id: str, file: str, commit: str, meter: Meter | None = None) -> Path:
        """With the blob in place this is the link to it in the snapshot, or a copy where there are no links."""
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()  # our log carries the progress
        options: dict[str, Any] = {}
        if meter is not None and "tqdm_class" in inspect.signature(hf_hub_download).parameters:
            options["tqdm_class"] = _reporting_to(meter)
        return Path(hf_hub_download(model_id, file, revision=commit, endpoint=constants.ENDPOINT, **options))


def _reporting_to(meter: Meter) -> type:
    """The library's progress bar, without the bar."""
    from huggingface_hub.utils import tqdm

    class Told(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            meter.received(int(n or 0))
            return None

    return Told
