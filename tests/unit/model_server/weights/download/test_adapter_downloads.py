"""Adapters of `--lora-adapters` from a hub made of dictionaries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.adapters import write_adapter

from model_server.adapters.folder import adapter_folders, read_adapter
from model_server.errors import StartupError
from model_server.weights.download.adapters import download_adapters
from model_server.weights.download.hub import Meter, Repository
from model_server.weights.hub_cache import snapshot_of
from model_server.weights.hub_errors import Unreachable
from model_server.weights.products import Products

COMMIT = "0123456789abcdef0123456789abcdef01234567"
EMPTY = b"\x02\0\0\0\0\0\0\0{}"
ADAPTER = ["adapter_config.json", "adapter_model.safetensors"]


class FakeHub:
    """Each repository with these files; `is_down`: nothing of it can be reached."""

    def __init__(self, names: list[str], *, is_offline: bool = False, is_down: bool = False) -> None:
        self.names, self.is_offline, self.is_down = names, is_offline, is_down
        self.asked: list[tuple[str, str | None]] = []
        self.fetched: list[str] = []

    def repository(self, model_id: str, revision: str | None) -> Repository:
        self.asked.append((model_id, revision))
        if self.is_down:
            raise Unreachable("connection refused")
        return Repository(commit=COMMIT, sizes=dict.fromkeys(self.names))

    def remove_partial_files(self, model_id: str) -> None: ...

    def fetch(self, model_id: str, file: str, commit: str, meter: Meter) -> Path:
        self.fetched.append(file)
        path = snapshot_of(model_id, commit) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(EMPTY if file.endswith(".safetensors") else b"{}")
        return path


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_config_and_safetensors_and_nothing_else(tmp_path: Path) -> None:
    others = ["README.md", "tokenizer.json", "code.py", "adapter_model.bin", "checkpoint-1/adapter_model.safetensors"]
    hub = FakeHub([*ADAPTER, *others])
    download_adapters(f"org/a@v2,{tmp_path},b=org/b", hub=hub)
    assert hub.asked == [("org/a", "v2"), ("org/b", None)]
    assert sorted(hub.fetched) == sorted(2 * ADAPTER)
    # What the shards look for is there, by the revision that was named.
    assert adapter_folders("org/a@v2,b=org/b") == {
        "org/a": snapshot_of("org/a", COMMIT),
        "b": snapshot_of("org/b", COMMIT),
    }


def test_a_pickled_folder_is_converted_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", {"down": (3, 2)}, rank=1)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    torch.save(tensors, folder / "adapter_model.bin")
    file.unlink()
    download_adapters(f"{folder}")
    assert not file.exists()
    download_adapters(f"{folder}", auto_convert=True)
    adapter = read_adapter("a", folder, Products(linear={"down": (3, 2)}), ("",))
    with adapter.open() as opened:
        for key, tensor in tensors.items():
            assert torch.equal(opened.rows(key, [(0, len(tensor))]), tensor)
    before = file.stat()
    download_adapters(f"{folder}", auto_convert=True)
    assert file.stat() == before and sorted(os.listdir(folder)) == [
        "adapter_config.json",
        "adapter_model.bin",
        "adapter_model.safetensors",
    ]
    file.unlink()
    (folder / "adapter_model.bin").write_bytes(b"damaged")
    with pytest.raises(StartupError, match=r"adapter_model\.bin"):
        download_adapters(f"{folder}", auto_convert=True)
    assert not file.exists()


@pytest.mark.parametrize("later", [FakeHub([], is_offline=True), FakeHub([], is_down=True)])
def test_what_is_cached_needs_no_network(later: FakeHub) -> None:
    download_adapters("org/a", hub=FakeHub(ADAPTER))
    download_adapters("org/a", hub=later)
    assert later.fetched == []


@pytest.mark.parametrize(
    ("hub", "message"),
    [
        (FakeHub(["config.json", "model.safetensors"]), "the repository has no adapter_config.json"),
        (
            FakeHub(["adapter_config.json", "adapter_model.bin"]),
            r"the repository has no safetensors \(found: adapter_c",
        ),
        (FakeHub(ADAPTER, is_offline=True), "HF_HUB_OFFLINE is set; give a folder, as in `name=path`"),
        (FakeHub(ADAPTER, is_down=True), "the hub cannot be reached .*; without a network give a folder"),
    ],
)
def test_refusals_name_the_adapter(hub: FakeHub, message: str) -> None:
    with pytest.raises(StartupError, match=rf"^LoRA adapter `mine` \(org/a\): .*{message}"):
        download_adapters("mine=org/a", hub=hub, wait_s=0)


def test_a_damaged_file_is_fetched_again() -> None:
    download_adapters("org/a", hub=FakeHub(ADAPTER))
    (snapshot_of("org/a", COMMIT) / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(StartupError, match=r"not all of it, and HF_HUB_OFFLINE is set"):
        download_adapters("org/a", hub=FakeHub(ADAPTER, is_offline=True))
