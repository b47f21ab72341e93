"""Whether a model can be fetched at all: the cache folder, the space on its disk, a network. Fetches nothing."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
from collections.abc import Mapping
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
_TRUE = frozenset({"1", "true", "yes", "on"})


def check_cache(model_id: str, snapshot: Path | None, environ: Mapping[str, str]) -> None:
    """Refuses a download that cannot be stored. Nothing is needed of the cache where the model is in it already.

    Raises ArgumentValidation.
    """
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
    """Whether to continue with a download; False: a signal came. Raises DownloadError if the hub has no address here,
    ArgumentValidation if HF_ENDPOINT is not a URL.

    Only the name is looked up, and only without a proxy: a proxy knows names that this machine does not.
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
                    f"({reason}); without a network use a local directory, or `--model-id demo`, which needs no "
                    "download"
                ) from None
        signals.wait(1.0)
        if signals.received:
            return False
