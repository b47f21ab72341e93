"""The download against a hub made of dictionaries."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from support.gguf_files import write_gguf
from support.tiny_models import tiny_checkpoint

from model_server.errors import StartupError
from model_server.weights.download.download import download
from model_server.weights.download.hub import HuggingFaceHub, Meter, Repository
from model_server.weights.hub_cache import snapshot_of
from model_server.weights.hub_errors import Unreachable
from model_server.weights.locate import resolve, resolve_merged, weight_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HEADER = b"\x02\0\0\0\0\0\0\0{}"
OTHERS = [
    "README.md",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "merges.txt",
    "modeling_x.py",
    "chat_template.jinja",
    "additional_chat_templates/tools.jinja",
]


class FakeHub:
    """Files by name; the first `failures` calls find no network."""

    is_offline = False

    def __init__(self, names: list[str], failures: int = 0, reason: str = "connection refused") -> None:
        self.names, self.failures, self.reason = names, failures, reason
        self.fetched: list[str] = []

    def repository(self, model_id: str, revision: str | None) -> Repository:
        self._maybe_fail()
        return Repository(commit=COMMIT, sizes=dict.fromkeys(self.names))

    def remove_partial_files(self, model_id: str) -> None: ...

    def fetch(self, model_id: str, file: str, commit: str, meter: Meter) -> Path:
        self._maybe_fail()
        self.fetched.append(file)
        path = snapshot_of(model_id, commit) / file
        path.parent.mkdir(parents=True, exist_ok=True)
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
    hub = FakeHub([*OTHERS, "model.safetensors", "pytorch_model.bin", "onnx/model.safetensors"])
    assert download("org/name", None, hub=hub) == snapshot_of("org/name", COMMIT)
    assert set(hub.fetched) == set(OTHERS) - {"README.md", "modeling_x.py"} | {"model.safetensors"}
    assert "Download file: model.safetensors" in caplog.messages
    assert any(text.startswith("Downloaded ") and "model.safetensors in " in text for text in caplog.messages)
    assert caplog.messages[-1] == "Download: [7/7] -- ETA: 0 s"


def test_code_only_when_trusted(tmp_path: Path) -> None:
    hub = FakeHub([*OTHERS, "model.safetensors"])
    download("org/name", None, hub=hub, trust_remote_code=True)
    assert "modeling_x.py" in hub.fetched


def test_index_picks_the_files(tmp_path: Path) -> None:
    shards = ["model-1.safetensors", "model-2.safetensors"]
    hub = FakeHub([*OTHERS, *shards, "consolidated.safetensors", "model.safetensors.index.json"])
    download("org/name", None, hub=hub)
    assert {n for n in hub.fetched if n.endswith(".safetensors")} == set(shards)


def test_network_hiccups_are_retried(tmp_path: Path) -> None:
    hub = FakeHub([*OTHERS, "model.safetensors"], failures=4)
    download("org/name", None, hub=hub, wait_s=0)
    assert "model.safetensors" in hub.fetched


def test_without_a_network(tmp_path: Path) -> None:
    hub = FakeHub([*OTHERS, "model.safetensors"], failures=5)
    with pytest.raises(StartupError, match=r"cannot be reached \(connection refused\).*the model `demo`"):
        download("org/name", None, hub=hub, wait_s=0)
    assert hub.failures == 0


def test_real_client_offline() -> None:
    """Whatever `model_id` is, HF_HUB_OFFLINE is named; and what huggingface_hub raises is understood."""
    with pytest.raises(StartupError, match=r"HF_HUB_OFFLINE is set.*the model `demo`"):
        download("org/name", None, hub=HuggingFaceHub(), wait_s=0)
    with pytest.raises(StartupError, match="neither a directory nor a hub id"):
        download("a/b/c", None, hub=HuggingFaceHub(), wait_s=0)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json", "pytorch_model.bin"], r"holds pickled weights \(pytorch_model.bin\) and no safetensors"),
        (["config.json", "model.onnx"], r"holds no weights in safetensors \(found: config.json, model.onnx, tok"),
        (["model.safetensors"], "has no config.json"),
    ],
)
def test_unusable_repository(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        download("org/name", None, hub=FakeHub([*names, "tokenizer.json"]))


def test_pickled_weights_are_fetched_only_to_convert_them(tmp_path: Path) -> None:
    parts = ["pytorch_model-1.bin", "pytorch_model-2.bin"]
    names = [*OTHERS, *parts, "training_args.bin", "optimizer.pt", "pytorch_model.bin.index.json"]
    hub = FakeHub(names)
    with pytest.raises(StartupError, match=r"convert them once with `model-server download-weights org/name --auto"):
        download("org/name", None, hub=hub)
    assert not [name for name in hub.fetched if name.endswith((".bin", ".pt"))]
    directory = download("org/name", None, hub=hub, auto_convert=True)
    assert {name for name in hub.fetched if name.endswith((".bin", ".pt"))} == set(parts)
    assert len(weight_files(directory)) == 2


def test_safetensors_win_over_pickled_weights(tmp_path: Path) -> None:
    hub = FakeHub([*OTHERS, "model.safetensors", "pytorch_model.bin", "consolidated.safetensors"])
    download("org/name", None, hub=hub, auto_convert=True)
    assert "pytorch_model.bin" not in hub.fetched
    assert "consolidated.safetensors" not in hub.fetched


def test_pickled_weights_in_the_cache_are_converted_without_a_network(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "config.json", "tokenizer.json")
    torch.save({"a": torch.ones(2)}, snapshot / "pytorch_model.bin")
    assert download("org/name", None, hub=FakeHub([], failures=1), auto_convert=True) == snapshot
    assert [f.name for f in weight_files(snapshot)] == ["model.safetensors"]


def test_local_directory_needs_no_hub(tmp_path: Path) -> None:
    hub = FakeHub([], failures=1)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartupError, match=r"has no \*\.safetensors"):
        download(str(tmp_path), None, hub=hub)
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(StartupError, match=r"no tokenizer.json, and nothing to make one of"):
        download(str(tmp_path), None, hub=hub)
    (tmp_path / "tokenizer.json").write_text("{}")
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


def test_complete_cache_needs_no_network(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    snapshot = cached(tmp_path, "config.json", "tokenizer.json")
    (snapshot / "model.safetensors").write_bytes(HEADER)
    assert download("org/name", None, hub=FakeHub([], failures=1)) == snapshot
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "connection refused; serving what is cached, commit abc" in record.getMessage()


@pytest.mark.parametrize("lacks", ["config.json", "tokenizer.json", "model.safetensors", "a whole file"])
def test_incomplete_cache_needs_the_network(tmp_path: Path, lacks: str) -> None:
    snapshot = cached(tmp_path, *({"config.json", "tokenizer.json"} - {lacks}))
    if lacks != "model.safetensors":
        (snapshot / "model.safetensors").write_bytes(HEADER[:9] if lacks == "a whole file" else HEADER)
    with pytest.raises(StartupError, match="cannot be reached"):
        download("org/name", None, hub=FakeHub([], failures=5), wait_s=0)


def test_code_that_is_trusted_but_not_there_is_fetched(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "config.json", "tokenizer.json")
    (snapshot / "model.safetensors").write_bytes(HEADER)
    (snapshot / "config.json").write_text('{"auto_map": {}}')
    hub = FakeHub([*OTHERS, "model.safetensors"])
    download("org/name", None, hub=hub, trust_remote_code=True)
    assert "modeling_x.py" in hub.fetched


def test_a_local_adapter_needs_its_base_model(tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    config.write_text("{}")
    with pytest.raises(StartupError, match="holds an adapter that does not name its base model"):
        download(str(tmp_path), None)
    config.write_text('{"base_model_name_or_path": "org/name", "revision": "v1"}')
    hub = FakeHub([*OTHERS, "model.safetensors"])
    found = download(str(tmp_path), None, hub=hub)
    assert found == resolve("org/name", "v1") and (found, tmp_path) == resolve_merged(str(tmp_path), None)
    config.write_text(f'{{"base_model_name_or_path": "{tmp_path}"}}')
    with pytest.raises(StartupError, match=r"is an adapter \(LoRA\), not a model, which is needed here"):
        resolve_merged(str(tmp_path), None)


def test_a_repository_of_gguf_files() -> None:
    hub = FakeHub(["README.md", "name-Q4_K_M.gguf"])
    with pytest.raises(StartupError, match="holds GGUF files and no other weights: choose one, as `--gguf-file name-"):
        download("org/name", None, hub=hub)
    assert hub.fetched == []
    with pytest.raises(StartupError, match=r"the repository has no file other.gguf \(GGUF files: name-Q4_K_M.gguf\)"):
        download("org/name/other.gguf", None, hub=hub)
    assert hub.fetched == []


def test_a_gguf_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.gguf").touch()
    with pytest.raises(StartupError, match=r"/a\.gguf: no such file \(GGUF files in its folder: b\.gguf\)$"):
        download(str(tmp_path / "a.gguf"), None)
    with pytest.raises(StartupError, match=r"/c/a\.gguf: no such file \(there is no folder .*/c\)$"):
        download(str(tmp_path / "c" / "a.gguf"), None)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StartupError, match=r"~/a\.gguf: no such file \(GGUF files in its folder: b\.gguf\)$"):
        download("~/a.gguf", None)


@pytest.mark.long
def test_one_gguf_file_of_a_repository(tmp_path: Path) -> None:
    """It is fetched once, and nothing beside it; config and tokenizer are made of it."""
    written = write_gguf(tiny_checkpoint("llama", tmp_path / "model"), tmp_path / "a.gguf", "Q8_0")

    class GgufHub(FakeHub):
        def fetch(self, model_id: str, file: str, commit: str, meter: Meter) -> Path:
            return Path(shutil.copy(written, super().fetch(model_id, file, commit, meter)))

    hub = GgufHub(["README.md", "config.json", "a.gguf", "b.gguf"])
    folder = download("org/name/a.gguf", None, hub=hub)
    assert hub.fetched == ["a.gguf"]
    assert (folder / "model.gguf").resolve() == (snapshot_of("org/name", COMMIT) / "a.gguf").resolve()
    assert resolve("org/name/a.gguf", None) == folder
    assert weight_files(folder) == [folder / "model.gguf"]
    assert download("org/name/a.gguf", None, hub=hub) == folder
    assert hub.fetched == ["a.gguf"]


@pytest.mark.long
def test_all_parts_of_a_gguf_file_of_a_repository(tmp_path: Path) -> None:
    first = write_gguf(tiny_checkpoint("llama", tmp_path / "model"), tmp_path / "a.gguf", "Q8_0", most_tensors=16)
    names = sorted(path.name for path in tmp_path.glob("a-*.gguf"))

    class GgufHub(FakeHub):
        def fetch(self, model_id: str, file: str, commit: str, meter: Meter) -> Path:
            return Path(shutil.copy(tmp_path / Path(file).name, super().fetch(model_id, file, commit, meter)))

    hub = GgufHub(["README.md", *(f"Q8_0/{name}" for name in names)])
    folder = download(f"org/name/Q8_0/{first.name}", None, hub=hub)
    assert len(names) > 1 and sorted(hub.fetched) == [f"Q8_0/{name}" for name in names]
    assert [path.resolve().name for path in weight_files(folder)] == names
    assert resolve(f"org/name/Q8_0/{names[-1]}", None) == folder
    with pytest.raises(StartupError, match=r"the repository has no file b-00001-of-00002.gguf"):
        download("org/name/b-00001-of-00002.gguf", None, hub=hub)


def test_configs_are_checked_before_weights_are_fetched() -> None:
    hub = FakeHub([*OTHERS, "quantize_config.json", "model.safetensors.index.json", "model-1.safetensors"])

    def check(directory: Path) -> None:
        assert (directory / "config.json").exists()
        raise StartupError("not this one")

    with pytest.raises(StartupError, match="not this one"):
        download("org/name", None, hub=hub, check=check)
    assert set(hub.fetched) == {"config.json", "quantize_config.json", "model.safetensors.index.json"}
