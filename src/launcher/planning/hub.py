"""Whether a model can be fetched: cache folder, disk space, network, files. Downloads nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import SplitResult, urlsplit
from urllib.request import proxy_bypass

from launcher.errors import ArgumentValidation, DownloadError
from launcher.planning.model_info import hub_cache
from launcher.processes.signals import Signals

logger = logging.getLogger("text_generation_launcher")

_FULL_BYTES = 64 << 20
"""Less than the smallest useful models need."""
_NEARLY_FULL_BYTES = 2 << 30
_NAME_SERVICE_PATIENCE_S = 15.0
"""A container may be up before its name service is."""
_DEFAULT_ENDPOINT = "https://huggingface.co"
HUB_TIMEOUT_S = 20.0
"""Of one answer of the hub."""
_TRUE = frozenset({"1", "true", "yes", "on"})


def check_cache(model_id: str, snapshot: Path | None, environ: Mapping[str, str]) -> None:
    """Refuse a download that cannot be stored, unless the model is cached already."""
    if snapshot is not None and any(snapshot.glob("*.safetensors")):
        return
    cache = hub_cache(environ)
    nearest = nearest_folder(cache)
    remedy = "give another folder with `--huggingface-hub-cache` (or HF_HOME)"
    if not nearest.is_dir():
        raise ArgumentValidation(f"the hub cache {cache} cannot be created: {nearest} is not a folder; {remedy}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        owner = f"the user {os.geteuid()} may not write to {nearest}"
        raise ArgumentValidation(f"the hub cache {cache} cannot be used for {model_id}: {owner}; {remedy}")
    try:
        free = shutil.disk_usage(nearest).free
    except OSError:
        return
    if free < _FULL_BYTES:
        raise ArgumentValidation(
            f"the disk of the hub cache {cache} is full ({free >> 20} MiB free), too little for {model_id}; {remedy}"
        )
    if free < _NEARLY_FULL_BYTES:
        logger.warning("The disk of the hub cache %s has %d MiB free; %s may not fit", cache, free >> 20, model_id)


def nearest_folder(path: Path) -> Path:
    """`path`, or the first above it that exists."""
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))


def is_offline(environ: Mapping[str, str]) -> bool:
    """By the hub library's own variable."""
    return environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE


def endpoint(environ: Mapping[str, str]) -> SplitResult:
    """The hub's address, with a host. Raises ArgumentValidation."""
    try:
        url = urlsplit(environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT)
        is_url = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ArgumentValidation(f"HF_ENDPOINT is not a URL; unset it, or set it to a URL such as {_DEFAULT_ENDPOINT}")
    return url


def proxy_for(url: SplitResult, environ: Mapping[str, str]) -> str | None:
    """The proxy that HTTP clients use for `url`, by the usual variables."""
    lower = {name.lower(): value for name, value in environ.items() if value and name.lower().endswith("_proxy")}
    found = lower.get(f"{url.scheme}_proxy") or lower.get("all_proxy")
    is_exempt = proxy_bypass(url.hostname or "", {"no": lower.get("no_proxy", "")})
    return None if is_exempt else found


def check_network(model_id: str, environ: Mapping[str, str], signals: Signals) -> bool:
    """Whether to download; False after a signal. Only the name is looked up, and only without a proxy.

    Raises:
        DownloadError: The hub has no address here.
        ArgumentValidation: HF_ENDPOINT is not a URL.
    """
    if is_offline(environ):
        return True
    url = endpoint(environ)
    host = url.hostname
    if proxy_for(url, environ):
        return True
    deadline = time.monotonic() + _NAME_SERVICE_PATIENCE_S
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return True
        except (OSError, UnicodeError) as error:
            is_passing = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
            if not is_passing or time.monotonic() > deadline:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                raise DownloadError(
                    f"{model_id} is not in the local cache, and the hub cannot be reached: {host} has no address here "
                    f"({reason}); without a network give a folder, a GGUF file, or the model `demo`, which needs no "
                    "download"
                ) from None
        signals.wait(1.0)
        if signals.received:
            return False


def files_of(model_id: str, revision: str | None) -> list[str]:
    """Names of a repository's files. Raises ArgumentValidation or DownloadError, one line each."""
    from huggingface_hub import HfApi

    with errors_in_words(model_id, revision):
        listed = HfApi().model_info(model_id, revision=revision, timeout=HUB_TIMEOUT_S)
        return [file.rfilename for file in listed.siblings or []]


@contextlib.contextmanager
def errors_in_words(model_id: str, revision: str | None) -> Iterator[None]:
    """Errors of the hub library as ArgumentValidation or DownloadError, one line each."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except HFValidationError:
        raise ArgumentValidation(f"{model_id} is neither a directory nor the id of a model (OWNER/NAME)") from None
    except GatedRepoError:
        raise DownloadError(
            f"{model_id} is gated: accept its terms on the hub, then give a token in HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise ArgumentValidation(
            f"{model_id} has no revision {revision}; `--revision` takes a branch, a tag or a full commit"
        ) from None
    except RepositoryNotFoundError:
        raise ArgumentValidation(
            f"the hub has no model {model_id} for this user: check the name, or give a token in HF_TOKEN"
        ) from None
    except OfflineModeIsEnabled:
        raise DownloadError(
            f"{model_id} is not completely in the local cache, and HF_HUB_OFFLINE is set, so the hub is not used"
        ) from None
    except Exception as error:  # what transports raise differs by version
        lines = str(error).splitlines() or [type(error).__name__]
        raise DownloadError(
            f"the hub cannot be queried for {model_id}: {lines[0]}; check the network with `launcher doctor`, or give "
            "a local directory"
        ) from None
