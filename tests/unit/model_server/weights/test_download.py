"""The download against a hub made of dictionaries."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from model_server.errors import StartupError
from model_server.weights.download import download
from model_server.weights.hub import HuggingFaceHub, Unreachable
from model_server.weights.locate import weight_files

OTHERS = [
    "README.md",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "merges.txt",
    "modeling_x.py",
    "chat_template.jinja",
]


class FakeHub:
    """Files by name; the first `failures` calls find no network."""

    def __init__(self, root: Path, names: list[str], failures: int = 0, reason: str = "connection refused") -> None:
        self.root, self.names, self.failures, self.reason = root, names, failures, reason
        self.fetched: list[str] = []

    def files(self, model_id: str, revision: str | None) -> list[str]:
        self._maybe_fail()
        return self.names

    def fetch(self, model_id: str, file: str, revision: str | None) -> Path:
        self._maybe_fail()
        self.fetched.append(file)
        path = self.root / file
        if file.endswith(".bin"):
            torch.save({file: torch.ones(2)}, path)
            return path
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        if "bin.index" in file:
            index = {"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}
        path.write_text(json.dumps(index) if "index" in file else "{}")
        return path

    def _maybe_fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise Unreachable(self.reason)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_fetches_what_serving_needs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    hub = FakeHub(tmp_path, [*OTHERS, "model.safetensors", "pytorch_model.bin", "onnx/model.safetensors"])
    assert download("org/name", None, hub=hub) == tmp_path
    assert set(hub.fetched) == set(OTHERS) - {"README.md", "modeling_x.py"} | {"model.safetensors"}
    texts = [r.getMessage() for r in caplog.records]
    assert texts[0] == "Download file: model.safetensors"
    assert texts[1].startswith(f"Downloaded {tmp_path / 'model.safetensors'} in ")
    assert texts[2] == "Download: [1/1] -- ETA: 0 s"


def test_code_only_when_trusted(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, [*OTHERS, "model.safetensors"])
    download("org/name", None, hub=hub, trust_remote_code=True)
    assert "modeling_x.py" in hub.fetched


def test_index_picks_the_files(tmp_path: Path) -> None:
    shards = ["model-1.safetensors", "model-2.safetensors"]
    hub = FakeHub(tmp_path, [*OTHERS, *shards, "consolidated.safetensors", "model.safetensors.index.json"])
    download("org/name", None, hub=hub)
    assert {n for n in hub.fetched if n.endswith(".safetensors")} == set(shards)


def test_network_hiccups_are_retried(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, [*OTHERS, "model.safetensors"], failures=4)
    download("org/name", None, hub=hub, wait_s=0)
    assert "model.safetensors" in hub.fetched


@pytest.mark.parametrize(("failures", "reason"), [(5, "connection refused"), (1, "offline mode is enabled")])
def test_without_a_network(tmp_path: Path, failures: int, reason: str) -> None:
    """Five tries, but only one when the user asked to stay offline."""
    hub = FakeHub(tmp_path, [*OTHERS, "model.safetensors"], failures=failures, reason=reason)
    with pytest.raises(StartupError) as caught:
        download("org/name", None, hub=hub, wait_s=0)
    assert hub.failures == 0
    assert "--model-id demo" in str(caught.value)
    assert reason in str(caught.value)


def test_real_client_offline() -> None:
    """What huggingface_hub raises is understood."""
    with pytest.raises(StartupError, match=r"cannot be reached .*offline.*--model-id demo"):
        download("org/name", None, hub=HuggingFaceHub(), wait_s=0)
    with pytest.raises(StartupError, match="neither a directory nor a hub id"):
        HuggingFaceHub().fetch("a/b/c", "config.json", None)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json", "pytorch_model.bin"], r"holds pickled weights \(pytorch_model.bin\) and no safetensors"),
        (["config.json", "model.gguf"], "holds no weights"),
        (["model.safetensors"], "has no config.json"),
    ],
)
def test_unusable_repository(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        download("org/name", None, hub=FakeHub(tmp_path, names))


def test_pickled_weights_are_fetched_only_to_convert_them(tmp_path: Path) -> None:
    parts = ["pytorch_model-1.bin", "pytorch_model-2.bin"]
    names = [*OTHERS, *parts, "training_args.bin", "optimizer.pt", "pytorch_model.bin.index.json"]
    hub = FakeHub(tmp_path, names)
    with pytest.raises(StartupError, match=r"convert them once with `model-server download-weights org/name --auto"):
        download("org/name", None, hub=hub)
    assert not [name for name in hub.fetched if name.endswith((".bin", ".pt"))]
    assert download("org/name", None, hub=hub, auto_convert=True) == tmp_path
    assert {name for name in hub.fetched if name.endswith((".bin", ".pt"))} == set(parts)
    assert len(weight_files(tmp_path)) == 2


def test_safetensors_win_over_pickled_weights(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, [*OTHERS, "model.safetensors", "pytorch_model.bin", "consolidated.safetensors"])
    download("org/name", None, hub=hub, auto_convert=True)
    assert "pytorch_model.bin" not in hub.fetched
    assert "consolidated.safetensors" not in hub.fetched


def test_pickled_weights_in_the_cache_are_converted_without_a_network(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "config.json")
    torch.save({"a": torch.ones(2)}, snapshot / "pytorch_model.bin")
    assert download("org/name", None, hub=FakeHub(tmp_path, [], failures=1), auto_convert=True) == snapshot
    assert [f.name for f in weight_files(snapshot)] == ["model.safetensors"]


def test_local_directory_needs_no_hub(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, [], failures=1)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartupError, match=r"has no \*\.safetensors"):
        download(str(tmp_path), None, hub=hub)
    (tmp_path / "model.safetensors").write_text("")
    assert download(str(tmp_path), None, hub=hub) == tmp_path
    assert hub.failures == 1


def cached(tmp_path: Path, *names: str) -> Path:
    """A snapshot of org/name in the cache that holds files of these names."""
    entry = tmp_path / "hub" / "models--org--name"
    snapshot = entry / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("abc")
    for name in names:
        (snapshot / name).write_text("{}")
    return snapshot


def test_complete_cache_needs_no_network(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "config.json", "model.safetensors")
    assert download("org/name", None, hub=FakeHub(tmp_path, [], failures=1)) == snapshot
