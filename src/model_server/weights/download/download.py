"""`model-server download-weights`: bring configs, tokenizer, templates and safetensors into the cache.

Code needs `trust_remote_code`, pickled weights `auto_convert`. A complete snapshot serves even if the hub does not
answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

from model_server.errors import StartupError
from model_server.weights.conversion.tokenizer import ensure_tokenizer, has_tokenizer, nothing_found
from model_server.weights.conversion.weights import (
    PICKLE_INDEX,
    convert,
    convert_adapter,
    has_pickled_weights,
    is_pickled_weights,
)
from model_server.weights.download import disk
from model_server.weights.download.hub import Hub, HuggingFaceHub, Repository
from model_server.weights.download.parallel import in_parallel
from model_server.weights.download.progress import DownloadProgress, interval, size
from model_server.weights.download.selection import side_files, weights
from model_server.weights.gguf.prepare import prepare
from model_server.weights.header import read_header
from model_server.weights.hub_cache import cache, discard, is_complete, record_commit, snapshot, snapshot_of
from model_server.weights.hub_errors import NotAnId, Refused, Unreachable
from model_server.weights.locate import (
    INDEX,
    adapter_directory,
    has_safetensors,
    is_local,
    resolve,
    weight_files,
)
from wire import tokenizer_file
from wire.lora.merged import ADAPTER_CONFIG, BaseModel, is_adapter, with_base
from wire.model_files import read_object
from wire.quantization import gguf
from wire.quantization.config import FILES
from wire.quantization.methods import refuse_gguf
from wire.speculation.heads import has_no_text

logger = logging.getLogger(__name__)

# Of the hub's answer, and of each file; the library itself continues a file while bytes arrive.
TRIES = 5
# Seconds before the second try; twice as many before each further one.
WAIT_S = 1.0
MAX_WAIT_S = 8.0
PARALLEL_FILES = 4

_T = TypeVar("_T")


def download(
    model_id: str,
    revision: str | None,
    *,
    trust_remote_code: bool = False,
    auto_convert: bool = False,
    hub: Hub | None = None,
    wait_s: float = WAIT_S,
    with_bars: bool = False,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Make `model_id` (of an adapter its base model, too) present; return its directory.

    Args:
        auto_convert: Convert pickled weights where there are no others.
        with_bars: Progress moves every second.
        check: Refuses a model by its configs before weights are fetched.

    Raises:
        StartupError: One line on what is missing or cannot be converted.
    """
    if gguf.names_file(model_id) and gguf.in_repository(model_id) is None:
        return _prepared(model_id, revision)
    fetch = partial(
        download, trust_remote_code=trust_remote_code, auto_convert=auto_convert, hub=hub, wait_s=wait_s,
        with_bars=with_bars, check=check,
    )  # fmt: skip
    here = is_local(model_id)
    if here and (adapter := adapter_directory(model_id, revision)) is not None:
        if auto_convert:
            convert_adapter(adapter)
        return _base_of(adapter, fetch, is_local=True)
    if here:
        directory = resolve(model_id, revision)
        if auto_convert and not has_safetensors(directory) and has_pickled_weights(directory):
            convert(directory)
        weight_files(directory)
        if auto_convert and not has_tokenizer(directory):
            logger.warning("%s: only its weights were asked for", nothing_found(str(directory)))
        elif not has_no_text(directory, StartupError):
            ensure_tokenizer(directory)
        logger.info("Files are already present on the host. Skipping download.")
        return directory
    stop = threading.Event()
    every_s = interval(with_bars)
    hub = hub or HuggingFaceHub(stop)
    asked = gguf.in_repository(model_id)
    wanted = (
        HubDownload(model_id, revision, trust_remote_code, auto_convert, hub, stop, wait_s, every_s, check)
        if asked is None
        else _GgufDownload(asked, revision, hub, stop, wait_s, every_s)
    )
    try:
        directory = wanted.run()
    except OSError as error:
        raise disk.explained(error, cache()) from error
    if asked is not None:
        return _prepared(model_id, revision)
    if is_adapter(_names(directory)):
        return _base_of(directory, fetch, is_local=False)
    if not has_no_text(directory, StartupError):
        ensure_tokenizer(directory)
    return directory


def _base_of(adapter: Path, fetch: Callable[[str, str | None], Path], *, is_local: bool) -> Path:
    """Fetch an adapter's base model."""

    def found(base: BaseModel) -> Path:
        logger.info("%s is an adapter of %s, which is needed too", adapter, base.model_id)
        return fetch(base.model_id, base.revision)

    return with_base(adapter, StartupError, is_local=is_local, find=found)[0]


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


class HubDownload:
    """One model of the hub, once."""

    def __init__(
        self, model_id: str, revision: str | None, code: bool, convert: bool, hub: Hub, stop: threading.Event,
        wait_s: float, every_s: float, check: Callable[[Path], None] | None,
    ) -> None:  # fmt: skip
        self._model_id, self._revision, self._code, self._convert = model_id, revision, code, convert
        self._hub, self._stop, self._wait_s, self._every_s = hub, stop, wait_s, every_s
        self._check = check

    @property
    def _where(self) -> str:
        return f"--model-id {self._model_id}"

    @property
    def _instead(self) -> str:
        """What serves without a network."""
        return "use a local directory, or the model `demo`, which needs no download"

    def run(self) -> Path:
        """The snapshot, complete. Raises StartupError, OSError."""
        cached = self._cached()
        if cached is not None and (self._hub.is_offline or is_complete(self._model_id, self._revision)):
            logger.info("Files are already present on the host. Skipping download.")
            return cached
        if self._hub.is_offline:
            raise StartupError(
                f"{self._where}: not in the local cache, or not all of it, and HF_HUB_OFFLINE is set; {self._instead}"
            )
        try:
            return self._from_hub(is_cached=cached is not None)
        except (Unreachable, Refused, disk.NotWritable) as error:
            if cached is not None:
                reason = str(error).removeprefix(f"{self._where}: ")
                logger.warning("%s: %s; serving what is cached, commit %s", self._where, reason, cached.name)
                return cached
            if not isinstance(error, Unreachable):
                raise
            raise StartupError(
                f"{self._where}: not in the local cache, and the hub cannot be reached ({error}); "
                f"without a network {self._instead}"
            ) from error

    def _cached(self) -> Path | None:
        """Return a whole snapshot, converting what can be, if there is one."""
        if (adapter := self._cached_adapter()) is not None and is_adapter(_names(adapter)):
            return adapter
        try:
            directory = resolve(self._model_id, self._revision)
        except NotAnId:
            raise
        except StartupError:
            return None
        if self._convert and not has_safetensors(directory) and has_pickled_weights(directory):
            convert(directory)
        try:
            for file in weight_files(directory):
                read_header(file)
            config = read_object(directory / "config.json", StartupError)
        except StartupError:
            return None
        lacks_code = self._code and "auto_map" in config and not any(directory.glob("*.py"))
        serves = has_tokenizer(directory) or has_no_text(directory, StartupError)
        return directory if serves and not lacks_code else None

    def _cached_adapter(self) -> Path | None:
        directory = snapshot(self._model_id, self._revision, ADAPTER_CONFIG)
        files = [] if directory is None else list(directory.glob("*.safetensors"))
        try:
            for file in files:
                read_header(file)
        except StartupError:
            return None
        return directory if files else None

    def _from_hub(self, *, is_cached: bool) -> Path:
        ask = partial(self._hub.repository, self._model_id, self._revision)
        found = ask() if is_cached else self._patiently("The hub", ask)
        logger.info("%s at revision %s is commit %s", self._model_id, self._revision or "main", found.commit)
        directory = snapshot_of(self._model_id, found.commit)
        if is_adapter(found.sizes):
            return self._fetch_adapter(found)
        refuse_gguf(found.sizes, self._model_id, StartupError)
        if "config.json" not in found.sizes:
            raise StartupError(f"{self._where}: the repository has no config.json")
        has_text = "tokenizer.json" in found.sizes or tokenizer_file.sources(found.sizes)
        if not has_text and not self._holds_heads(found):
            raise StartupError(nothing_found(f"{self._where}: the repository"))
        wanted = self._wanted(found, directory)
        missing = self._missing(found, wanted)
        if missing:
            self._check_configs(found, directory)
            self._fetch_all(found, missing)
        if not has_safetensors(directory):
            convert(directory)
        weight_files(directory)
        record_commit(self._model_id, self._revision, found.commit)
        if not missing:
            logger.info("Files are already present on the host. Skipping download.")
        return directory

    def _wanted(self, found: Repository, directory: Path) -> list[str]:
        """List files, by the index fetched first."""
        names = found.sizes
        side = side_files(names, code=self._code)
        indices: dict[str, Path] = {}
        for name in (INDEX, PICKLE_INDEX) if self._convert else (INDEX,):
            if name in names:
                if not _is_there(directory / name, names[name]):
                    disk.check_writable(cache())
                indices[name] = self._fetch(found, name, _Nobody())
        if _only_pickled(names) and has_safetensors(directory):
            return side  # converted before; the originals may have been removed
        picked = weights(
            self._model_id, names, indices.get(INDEX), indices.get(PICKLE_INDEX), pickled_allowed=self._convert
        )
        return [*side, *(name for name in picked if name not in side)]

    def _holds_heads(self, found: Repository) -> bool:
        """Whether it drafts for another model, whose tokenizer serves."""
        return has_no_text(self._fetch(found, "config.json", _Nobody()).parent, StartupError)

    def _check_configs(self, found: Repository, directory: Path) -> None:
        if self._check is None:
            return
        disk.check_writable(cache())
        for name in ("config.json", *FILES):
            if name in found.sizes:
                self._fetch(found, name, _Nobody())
        self._check(directory)

    def _fetch_adapter(self, found: Repository) -> Path:
        top = [name for name in found.sizes if "/" not in name]
        safetensors = sorted(name for name in top if name.endswith(".safetensors"))
        if ADAPTER_CONFIG not in top:
            raise StartupError(f"{self._where}: the repository has no {ADAPTER_CONFIG}")
        if not safetensors:
            listed = ", ".join(sorted(top)[:8])
            raise StartupError(
                f"{self._where}: the repository has no safetensors (found: {listed}); load the adapter with PEFT and "
                "save it again, which writes them"
            )
        missing = self._missing(found, [ADAPTER_CONFIG, *safetensors])
        if missing:
            self._fetch_all(found, missing)
        record_commit(self._model_id, self._revision, found.commit)
        return snapshot_of(self._model_id, found.commit)

    def _missing(self, found: Repository, names: Collection[str]) -> list[str]:
        directory = snapshot_of(self._model_id, found.commit)
        return [name for name in names if not _is_there(directory / name, found.sizes[name])]

    def _fetch_all(self, found: Repository, missing: list[str]) -> None:
        disk.check_writable(cache())
        total = sum(found.sizes[name] or 0 for name in missing)
        to_convert = sum(found.sizes[name] or 0 for name in missing if is_pickled_weights(name))
        self._hub.remove_partial_files(self._model_id)
        disk.check_room(cache(), total + to_convert)
        logger.info("Downloading %d files, %s", len(missing), size(total))
        with DownloadProgress(len(missing), total, every_s=self._every_s) as progress:
            jobs = [partial(self._fetch_one, found, name, progress) for name in missing]
            in_parallel(jobs, PARALLEL_FILES, self._stop)

    def _fetch_one(self, found: Repository, name: str, progress: DownloadProgress) -> None:
        logger.info("Download file: %s", name)
        started = time.perf_counter()
        path = self._fetch(found, name, progress)
        progress.file_done(path, time.perf_counter() - started)

    def _fetch(self, found: Repository, name: str, meter: DownloadProgress | _Nobody) -> Path:
        path = snapshot_of(self._model_id, found.commit) / name
        if _is_there(path, found.sizes[name]):
            return path
        if path.exists():
            logger.warning("%s has not the size that the hub gives: fetching it again", path)
            discard(self._model_id, path)
        return self._patiently(name, lambda: self._hub.fetch(self._model_id, name, found.commit, meter))

    def _patiently(self, what: str, call: Callable[[], _T]) -> _T:
        """Call again while the network fails, `TRIES` times in all."""
        wait_s = self._wait_s
        for num_failed in range(1, TRIES):
            try:
                return call()
            except Unreachable as error:
                if self._stop.is_set():
                    raise
                pause_s = error.wait_s if error.wait_s is not None else wait_s
                logger.warning("%s: %s; again in %g s (%d of %d)", what, error, pause_s, num_failed, TRIES - 1)
                self._stop.wait(pause_s)
                wait_s = min(2 * wait_s, MAX_WAIT_S)
        return call()


class _GgufDownload(HubDownload):
    """One GGUF file of a repository, with all its parts, once."""

    def __init__(
        self, asked: tuple[str, str], revision: str | None, hub: Hub, stop: threading.Event, wait_s: float,
        every_s: float,
    ) -> None:  # fmt: skip
        super().__init__(asked[0], revision, False, False, hub, stop, wait_s, every_s, None)
        self._file = asked[1]
        self._parts = gguf.parts_of(asked[1])

    def _cached(self) -> Path | None:
        file = gguf.file_of(f"{self._model_id}/{self._file}", self._revision, cache())
        if file is None or not all(file.with_name(Path(part).name).is_file() for part in self._parts):
            return None
        return file.parents[self._file.count("/")]

    def _from_hub(self, *, is_cached: bool) -> Path:
        ask = partial(self._hub.repository, self._model_id, self._revision)
        found = ask() if is_cached else self._patiently("The hub", ask)
        if missing := [part for part in self._parts if part not in found.sizes]:
            others = _listed(name for name in found.sizes if name.endswith(gguf.SUFFIX))
            raise StartupError(f"{self._where}: the repository has no file {missing[0]} (GGUF files: {others})")
        directory = snapshot_of(self._model_id, found.commit)
        if lacking := [part for part in self._parts if not _is_there(directory / part, found.sizes[part])]:
            self._fetch_all(found, lacking)
        record_commit(self._model_id, self._revision, found.commit)
        return directory


def _prepared(model_id: str, revision: str | None) -> Path:
    """Return the folder of a local GGUF file's config and tokenizer."""
    file = gguf.file_of(model_id, revision, cache())
    if file is None:
        folder = Path(model_id).expanduser().parent
        others = _listed(path.name for path in folder.glob(f"*{gguf.SUFFIX}"))
        where = f"GGUF files in its folder: {others}" if folder.is_dir() else f"there is no folder {folder}"
        raise StartupError(f"--model-id {model_id}: no such file ({where})")
    return prepare(file, cache())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:8]) or "none"


class _Nobody:
    """Meter of small files."""

    def received(self, num_bytes: int) -> None: ...
    def found(self, num_bytes: int) -> None: ...


def _is_there(path: Path, num_bytes: int | None) -> bool:
    """Whether a snapshot's file has its size."""
    try:
        there = path.stat().st_size
    except OSError:
        return False
    return num_bytes is None or there == num_bytes


def _only_pickled(names: Collection[str]) -> bool:
    return not any(name.endswith(".safetensors") for name in names if "/" not in name)
