"""What a server needs around it: Python, a port, a folder for models with space, the hub."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from launcher.config import LauncherConfig
from launcher.doctor.finding import Finding
from launcher.errors import ArgumentValidation
from launcher.planning.hub import is_offline, nearest_folder
from launcher.planning.model_info import hub_cache, shown_bytes
from launcher.planning.preflight import http_port, listening_address

_CONNECT_TIMEOUT_S = 3.0
_LITTLE_DISK = 20 << 30


def python() -> Finding:
    return Finding(name="Python", text=f"{platform.python_implementation()} {platform.python_version()}")


def port(hostname: str, number: int) -> Finding:
    config = LauncherConfig(hostname=hostname, port=number)
    try:
        address = listening_address(config)
        http_port(config, address)
    except ArgumentValidation as error:
        return Finding(
            name="port", state="error", text=str(error).replace("`", "").partition(";")[0],
            remedy=f"launcher serve MODEL --port {number + 1}",
        )  # fmt: skip
    return Finding(name="port", text=f"{number} is free")


def cache(environ: Mapping[str, str]) -> Finding:
    """The folder of downloaded models."""
    folder = hub_cache(environ)
    nearest = nearest_folder(folder)
    remedy = "launcher serve MODEL --huggingface-hub-cache /path/with/space"
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return Finding(name="models", state="error", text=f"{folder} cannot be written", remedy=remedy)
    try:
        free = shutil.disk_usage(nearest).free
    except OSError as error:
        return Finding(name="models", state="warning", text=f"{folder}: {error.strerror}", remedy=remedy)
    text = f"{folder}, {shown_bytes(free)} free"
    if free < _LITTLE_DISK:
        return Finding(name="models", state="warning", text=f"{text}: room for small models only", remedy=remedy)
    return Finding(name="models", text=text)


def hub(environ: Mapping[str, str]) -> Finding:
    """Whether its host takes connections. Gives up after seconds."""
    url = urlsplit(environ.get("HF_ENDPOINT") or "https://huggingface.co")
    token = "HF_TOKEN is set" if environ.get("HF_TOKEN") else "no HF_TOKEN, which gated models need"
    if is_offline(environ):
        return Finding(name="hub", text="not checked, because HF_HUB_OFFLINE is set; models come from the local cache")
    host, number = url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
    try:
        with socket.create_connection((host, number), timeout=_CONNECT_TIMEOUT_S):
            return Finding(name="hub", text=f"{host} can be reached; {token}")
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return Finding(
            name="hub", state="warning", text=f"{host} cannot be reached ({reason}): no model can be downloaded",
            remedy="serve a local directory or the embedded model: launcher serve demo",
        )  # fmt: skip
