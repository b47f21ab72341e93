"""What a server needs around it: Python, a port, a folder for models with space, the hub."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import socket
import threading
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from urllib.parse import SplitResult, urlsplit

from launcher.config import LauncherConfig
from launcher.doctor.finding import Finding
from launcher.errors import ArgumentValidation
from launcher.planning.hub import endpoint, is_offline, nearest_folder, proxy_for
from launcher.planning.model_info import hub_cache, shown_bytes
from launcher.planning.preflight import http_port, listening_address

_CONNECT_TIMEOUT_S = 5.0
_DEFAULT_PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
_LAST_PRIVILEGED_PORT, _LAST_PORT = 1023, 65535
_LITTLE_DISK = 20 << 30


def python() -> Finding:
    return Finding(name="Python", text=f"{platform.python_implementation()} {platform.python_version()}")


def port(hostname: str, number: int) -> Finding:
    """Whether the server could listen there."""
    config = LauncherConfig(hostname=hostname, port=number)
    try:
        http_port(config, listening_address(config))
    except ArgumentValidation as error:
        text = str(error).replace("`", "").partition(";")[0]
        return Finding(name="port", state="error", text=text, remedy=f"launcher serve MODEL {_other(config)}")
    return Finding(name="port", text=f"{number} is free")


def _other(config: LauncherConfig) -> str:
    """The option that helps: where no port can be opened, it is the address that is wrong."""
    try:
        http_port(dataclasses.replace(config, port=0), listening_address(config))
    except ArgumentValidation:
        return "--hostname 0.0.0.0"
    is_next_allowed = _LAST_PRIVILEGED_PORT < config.port < _LAST_PORT
    return f"--port {config.port + 1 if is_next_allowed else 8080}"


def cache(environ: Mapping[str, str]) -> Finding:
    """The folder of downloaded models. One that can only be read serves what is in it."""
    folder = hub_cache(environ)
    nearest = nearest_folder(folder)
    remedy = "launcher serve MODEL --huggingface-hub-cache /path/with/space"
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        if folder.is_dir():
            text = f"{folder} can only be read: no downloads"
            return Finding(name="models", state="warning", text=text, remedy=remedy)
        return Finding(name="models", state="error", text=f"{folder} cannot be created", remedy=remedy)
    try:
        free = shutil.disk_usage(nearest).free
    except OSError as error:
        return Finding(name="models", state="warning", text=f"{folder}: {error.strerror}", remedy=remedy)
    text = f"{folder}, {shown_bytes(free)} free"
    if free < _LITTLE_DISK:
        return Finding(name="models", state="warning", text=f"{text}: room for small models only", remedy=remedy)
    return Finding(name="models", text=text)


def hub(environ: Mapping[str, str]) -> Finding:
    """Whether its host, or the proxy for it, takes connections. Gives up after seconds."""
    if is_offline(environ):
        return Finding(name="hub", text="not checked, because HF_HUB_OFFLINE is set; models come from the local cache")
    try:
        url = endpoint(environ)
    except ArgumentValidation as error:
        text, _, remedy = str(error).partition("; ")
        return Finding(name="hub", state="warning", text=f"{text}: no downloads", remedy=remedy)
    host, number = _address(url)
    shown, proxy = host, proxy_for(url, environ)
    if proxy is not None:
        try:
            host, number = _address(urlsplit(proxy if "://" in proxy else f"http://{proxy}"))
        except ValueError:
            return Finding(
                name="hub", state="warning", text=f"the proxy for {shown} is not a URL: no downloads",
                remedy="set HTTPS_PROXY to a URL such as http://HOST:PORT, or unset it",
            )  # fmt: skip
        shown = f"the proxy {host}:{number} for {shown}"
    failure = _connection_failure(host, number)
    if failure is None:
        return Finding(name="hub", text=f"{shown} can be reached; {_token()}")
    return Finding(
        name="hub", state="warning", text=f"{shown} cannot be reached ({failure}): no downloads",
        remedy="serve a local directory or the embedded model: launcher serve demo",
    )  # fmt: skip


def _address(url: SplitResult) -> tuple[str, int]:
    """Host and port. Raises ValueError if there are none."""
    if url.scheme not in _DEFAULT_PORTS or not url.hostname:
        raise ValueError(url.scheme)
    return url.hostname, url.port or _DEFAULT_PORTS[url.scheme]


def _connection_failure(host: str, number: int) -> str | None:
    """Say why a connection fails, or None; runs in a thread, since looking up a name has no timeout."""
    answers: SimpleQueue[str | None] = SimpleQueue()

    def connect() -> None:
        try:
            socket.create_connection((host, number), timeout=_CONNECT_TIMEOUT_S).close()
        except (OSError, UnicodeError) as error:
            answers.put((error.strerror if isinstance(error, OSError) else None) or str(error))
        else:
            answers.put(None)

    threading.Thread(target=connect, daemon=True).start()
    try:
        return answers.get(timeout=_CONNECT_TIMEOUT_S)
    except Empty:
        return f"no answer for {_CONNECT_TIMEOUT_S:.0f} s"


def _token() -> str:
    from huggingface_hub import get_token

    return "there is a token" if get_token() else "no token, which gated models need (hf auth login, or HF_TOKEN)"
