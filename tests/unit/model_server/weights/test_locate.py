"""Where a model id leads, and which files are its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_server.errors import StartupError
from model_server.weights.locate import is_local, resolve, weight_files
from wire.quantization import gguf


def touch(directory: Path, *names: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).write_text("{}")
    return directory


def test_demo() -> None:
    assert (resolve("demo", None) / "config.json").is_file()


def test_directory(tmp_path: Path) -> None:
    model = touch(tmp_path / "m", "config.json")
    assert resolve(str(model), None) == model


@pytest.mark.parametrize("word", ["/no/such", "./no", "../no", "~/no-such-directory"])
def test_a_path_is_never_a_hub_id(word: str) -> None:
    assert is_local(word)
    with pytest.raises(StartupError, match=r"^--model-id .*no-?.*: no such directory$"):
        resolve(word, None)


def test_directory_without_config(tmp_path: Path) -> None:
    touch(tmp_path / "m", "readme.md")
    with pytest.raises(StartupError, match=r"has no config\.json \(found: readme\.md\)"):
        resolve(str(tmp_path / "m"), None)
    with pytest.raises(StartupError, match=r"\(found: nothing\)"):
        resolve(str(touch(tmp_path / "empty")), None)


def test_root_of_a_cache_entry_names_the_snapshot(tmp_path: Path) -> None:
    snapshot = touch(tmp_path / "models--org--name" / "snapshots" / "abc", "config.json")
    with pytest.raises(StartupError, match=f"use --model-id {snapshot}"):
        resolve(str(tmp_path / "models--org--name"), None)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache with one model org/name at main."""
    root = tmp_path / "hub"
    entry = root / "models--org--name"
    touch(entry / "snapshots" / "abc", "config.json", "model.safetensors")
    touch(entry / "refs")
    (entry / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    return entry / "snapshots" / "abc"


def test_cached_hub_model(cache: Path) -> None:
    assert resolve("org/name", None) == cache
    assert resolve("org/name", "main") == cache


def test_not_cached(cache: Path) -> None:
    with pytest.raises(StartupError) as caught:
        resolve("org/other", None)
    assert "download-weights org/other" in str(caught.value)
    assert "the model `demo`" in str(caught.value)
    with pytest.raises(StartupError, match="not in the local cache"):
        resolve("org/name", "other-branch")


def test_not_an_id(cache: Path) -> None:
    with pytest.raises(StartupError, match="a/b/c: neither a directory nor a hub id"):
        resolve("a/b/c", None)


def test_weight_files_skip_by_products(tmp_path: Path) -> None:
    touch(tmp_path, "b.safetensors", "a.safetensors", "training_args.safetensors", "adapter_model.safetensors", "x.bin")
    assert [f.name for f in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]
    touch(tmp_path, "model.safetensors", "optimizer.safetensors")  # as transformers
    assert [f.name for f in weight_files(tmp_path)] == ["model.safetensors"]


def test_index_decides(tmp_path: Path) -> None:
    touch(tmp_path, "model-1.safetensors", "model-2.safetensors", "consolidated.safetensors")
    index = {"weight_map": {"x": "model-2.safetensors", "y": "model-1.safetensors", "z": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [f.name for f in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(StartupError, match=r"lacks 1 of 2 weight files, first model-2.safetensors"):
        weight_files(tmp_path)


def test_a_whole_file_is_read_without_an_index_that_names_a_missing_one(tmp_path: Path) -> None:
    """As transformers does; with both there, both are read."""
    touch(tmp_path, "model.safetensors", "more.safetensors")
    index = {"weight_map": {"x": "model.safetensors", "y": "more.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [f.name for f in weight_files(tmp_path)] == ["model.safetensors", "more.safetensors"]
    (tmp_path / "more.safetensors").unlink()
    assert [f.name for f in weight_files(tmp_path)] == ["model.safetensors"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "y" * 5000}}))
    assert [f.name for f in weight_files(tmp_path)] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "does not hold a JSON object"),
        ("{}", "has no usable `weight_map`"),
        ('{"weight_map": {"x": 3}}', "has no usable `weight_map`"),
        ('{"weight_map": {"x": "../secret.safetensors"}}', "names a file outside its directory"),
    ],
)
def test_bad_index(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(StartupError, match=message):
        weight_files(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    touch(tmp_path, "config.json", "pytorch_model.bin", "training_args.bin")
    with pytest.raises(StartupError, match=r"pickled weights \(pytorch_model.bin\) and no safetensors.*--auto-convert"):
        weight_files(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    touch(tmp_path, "config.json", "notes.txt")
    with pytest.raises(StartupError, match=r"has no \*\.safetensors \(found: config\.json, notes\.txt\)"):
        weight_files(tmp_path)


def test_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their path or in a repository, once config and tokenizer have been made of them."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    file = tmp_path / "a.gguf"
    assert is_local(str(file))
    with pytest.raises(StartupError, match=r"a\.gguf: no such file; run `model-server download-weights .*a\.gguf`$"):
        resolve(str(file), None)
    file.touch()
    with pytest.raises(StartupError, match="its config and tokenizer have not been made; run `model-server download-w"):
        resolve(str(file), None)
    made = touch(gguf.folder_of(file, tmp_path / "hub"), "tokenizer.json", gguf.WEIGHTS)
    assert resolve(str(file), None) == made
    assert weight_files(made) == [made / gguf.WEIGHTS]
    file.write_text("another")
    assert gguf.folder_of(file, tmp_path / "hub") != made
    commit = touch(tmp_path / "hub/models--org--name/snapshots/abc", "a.gguf")
    touch(tmp_path / "hub/models--org--name/refs", "main").joinpath("main").write_text("abc")
    assert gguf.file_of("org/name/a.gguf", None, tmp_path / "hub") == commit / "a.gguf"
    assert gguf.file_of("org/name/a.gguf", "other", tmp_path / "hub") is None
