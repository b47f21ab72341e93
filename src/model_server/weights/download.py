"""`model-server download-weights`: bring what serving needs of a hub model into the local cache.

That is: configs, tokenizer, chat templates, safetensors. Code files are fetched only with `trust_remote_code`, pickled
weights only to convert them at once, with `auto_convert` and where there are no safetensors. What is already complete
in the cache is used without asking the network (launcher.md R12).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from model_server.errors import StartupError
from model_server.weights.convert import PICKLE_INDEX, convert, has_pickled_weights, pickled_names
from model_server.weights.hub import Hub, HuggingFaceHub, Unreachable
from model_server.weights.locate import (
    INDEX,
    SKIPPED_WORDS,
    has_safetensors,
    is_local,
    resolve,
    weight_files,
    weight_map,
)

logger = logging.getLogger(__name__)

# As TGI's (utils/hub.py).
TRIES = 5
WAIT_S = 5.0
PARALLEL_FILES = 4

_SIDE_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_CODE_SUFFIXES = (".py",)
_T = TypeVar("_T")


def download(
    model_id: str,
    revision: str | None,
    *,
    trust_remote_code: bool = False,
    auto_convert: bool = False,
    hub: Hub | None = None,
    wait_s: float = WAIT_S,
) -> Path:
    """Make `model_id` present on this machine and return its directory.

    auto_convert: where there are only pickled weights, write safetensors beside them (see `convert`).

    Raises StartupError, one line: unknown or gated repository, no network and nothing cached, pickled weights only, or
    ones that cannot be converted.
    """
    directory = _on_this_machine(model_id, revision)
    if directory is not None:
        if auto_convert and not has_safetensors(directory) and has_pickled_weights(directory):
            convert(directory)
        if is_local(model_id) or _is_complete(directory):
            weight_files(directory)
            logger.info("Files are already present on the host. Skipping download.")
            return directory
    hub = hub or HuggingFaceHub()
    try:
        directory = _fetch_all(hub, model_id, revision, trust_remote_code, auto_convert, wait_s)
    except Unreachable as error:
        raise StartupError(
            f"--model-id {model_id}: not in the local cache, and the hub cannot be reached ({error}); "
            "without a network use a local directory, or `--model-id demo`, which needs no download"
        ) from error
    if not has_safetensors(directory):
        convert(directory)
    return directory


def _on_this_machine(model_id: str, revision: str | None) -> Path | None:
    """The directory or cached snapshot, complete or not. Raises StartupError if a directory is meant but unusable."""
    if is_local(model_id):
        return resolve(model_id, revision)
    try:
        return resolve(model_id, revision)
    except StartupError:
        return None


def _is_complete(directory: Path) -> bool:
    try:
        weight_files(directory)
    except StartupError:
        return False
    return True


def _fetch_all(hub: Hub, model_id: str, revision: str | None, code: bool, pickled: bool, wait_s: float) -> Path:
    names = _patiently(lambda: hub.files(model_id, revision), wait_s)
    top = [name for name in names if "/" not in name]
    suffixes = _SIDE_SUFFIXES + (_CODE_SUFFIXES if code else ())
    side = sorted(name for name in top if name.endswith(suffixes))
    if "config.json" not in side:
        raise StartupError(f"--model-id {model_id}: the repository has no config.json")
    paths = {name: _fetch(hub, model_id, name, revision, wait_s) for name in side}
    weights = _weights(model_id, top, paths.get(INDEX), paths.get(PICKLE_INDEX) if pickled else None, pickled)
    started = time.perf_counter()
    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        jobs = {pool.submit(_fetch_weights, hub, model_id, name, revision, wait_s) for name in weights}
        try:
            for done, job in enumerate(as_completed(jobs), start=1):
                job.result()
                left_s = (time.perf_counter() - started) / done * (len(weights) - done)
                logger.info("Download: [%d/%d] -- ETA: %.0f s", done, len(weights), left_s)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return paths["config.json"].parent


def _weights(
    model_id: str, names: list[str], index: Path | None, pickle_index: Path | None, pickled_allowed: bool
) -> list[str]:
    """The weight files to fetch: those of the index, or all that TGI would take; pickled ones for want of any other."""
    weights = _listed(names, index)
    if not weights:
        safe = [n for n in names if n.endswith(".safetensors") and not any(word in n for word in SKIPPED_WORDS)]
        weights = sorted(n for n in safe if not n.startswith("consolidated")) or sorted(safe)
    if weights:
        return weights
    pickled = _listed(names, pickle_index) or pickled_names(names)
    if not pickled:
        raise StartupError(f"--model-id {model_id}: the repository holds no weights")
    if not pickled_allowed:
        raise StartupError(
            f"--model-id {model_id}: the repository holds pickled weights ({pickled[0]}) and no safetensors; "
            "Tercet never unpickles on its own: convert them once with "
            f"`model-server download-weights {model_id} --auto-convert`"
        )
    return pickled


def _listed(names: list[str], index: Path | None) -> list[str]:
    """The files that an index lists and the repository has."""
    return [] if index is None else sorted(set(weight_map(index).values()) & set(names))


def _fetch_weights(hub: Hub, model_id: str, name: str, revision: str | None, wait_s: float) -> None:
    logger.info("Download file: %s", name)
    started = time.perf_counter()
    path = _fetch(hub, model_id, name, revision, wait_s)
    logger.info("Downloaded %s in %.1f s.", path, time.perf_counter() - started)


def _fetch(hub: Hub, model_id: str, name: str, revision: str | None, wait_s: float) -> Path:
    return _patiently(lambda: hub.fetch(model_id, name, revision), wait_s)


def _patiently(call: Callable[[], _T], wait_s: float) -> _T:
    """`call`, again after `wait_s` seconds while the network fails. Being offline on purpose is not retried."""
    for attempt in range(1, TRIES + 1):
        try:
            return call()
        except Unreachable as error:
            if attempt == TRIES or "offline mode" in str(error).lower():
                raise
            logger.warning("Download failed (%s); trying again, %d of %d", error, attempt + 1, TRIES)
            time.sleep(wait_s)
    raise AssertionError("unreachable: the last attempt returns or raises")
