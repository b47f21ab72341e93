"""A hub on loopback, which the real hub library asks, and a repository in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_files import ID, LARGE, SIDE
from support.hub_server import HubServer, Repository


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with HubServer() as server:
        for name, value in {
            "ENDPOINT": server.url, "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_DOWNLOAD_TIMEOUT": 10, "HF_TOKEN_PATH": str(tmp_path / "token"), "HF_HUB_ETAG_TIMEOUT": 20,
            "DOWNLOAD_CHUNK_SIZE": 10_000,
        }.items():  # fmt: skip
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


@pytest.fixture
def repository(hub: HubServer) -> Repository:
    return hub.add(ID, {**SIDE, "model.safetensors": LARGE})
