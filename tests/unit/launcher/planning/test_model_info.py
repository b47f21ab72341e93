"""Reading of config.json, and where a model lies."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from launcher.errors import ArgumentValidation
from launcher.planning.adapters import base_id
from launcher.planning.gguf_choice import check_gguf_file
from launcher.planning.model_info import (
    ModelInfo,
    check_directory,
    directory,
    from_config,
    hub_cache,
    is_local,
    is_misspelt_demo,
    read,
    shown_bytes,
    similar_cached,
    similar_directory,
    with_hub_cache,
)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"max_seq_len": 5}, {"max_position_embeddings": 5}),
        ({"n_positions": 6}, {"max_position_embeddings": 6}),
        ({"max_position_embeddings": 4, "n_positions": 6}, {"max_position_embeddings": 4}),
        ({"n_embd": 8, "num_attention_heads": 2}, {"hidden_size": 8, "head_dim": 4, "num_kv_heads": 2}),
        ({"hidden_size": 9, "num_attention_heads": 2}, {"head_dim": None}),
        ({"hidden_size": 8, "num_attention_heads": 2, "head_dim": 16}, {"head_dim": 16}),
        ({"text_config": {"head_dim": 32}}, {"head_dim": 32}),
        ({"text_config": {}, "model_type": "gemma3"}, {"head_dim": 256}),
        ({"text_config": {}, "model_type": "llava"}, {"head_dim": None}),
        ({"num_key_value_heads": 1, "num_attention_heads": 4}, {"num_kv_heads": 1}),
        ({"vision_config": {}}, {"has_vision": True}),
        ({"quantization_config": {"quant_method": "mxfp4"}}, {"quantize": "mxfp4"}),
        ({"quantization_config": {}}, {"quantize": None}),
        ({"compression_config": {"format": "x"}}, {"quantize": "unknown"}),
        ({"n_shared_experts": 2, "num_local_experts": 8, "num_experts_per_tok": 3},
         {"num_shared_experts": 2, "num_experts": 8, "experts_per_token": 3}),
        # One odd field does not cost the others.
        ({"hidden_size": "big", "vocab_size": 7, "max_position_embeddings": True, "model_type": 3}, {"vocab_size": 7}),
    ],
)  # fmt: skip
def test_facts(config: dict[str, Any], expected: dict[str, Any]) -> None:
    info = from_config(config)
    for name, value in expected.items():
        assert getattr(info, name) == value
    if not config:
        assert info == ModelInfo()


@pytest.mark.parametrize("content", [None, "{", "[]", "[" * 100_000])
def test_unreadable_config_is_one_warning(
    content: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path) is None
    assert len(caplog.records) == 1
    assert read(None) is None


def test_local_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    assert all(is_local(name) for name in ("demo", "/x", "./x", "../x", "org"))
    assert not any(is_local(name) for name in ("org/model", "gpt2"))
    assert directory("./x", None, {}) == Path("./x")


def test_a_home_directory_that_no_shell_has_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert directory("~/m", None, {}) == tmp_path / "m"
    assert directory("~nobody-here/m", None, {}) == Path("~nobody-here/m")


def test_demo_model_has_a_directory() -> None:
    path = directory("demo", None, {})
    assert path is not None and path.name == "demo_model"


def test_snapshot_in_the_hub_cache(tmp_path: Path) -> None:
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    assert directory("org/model", None, environ) is None
    repository = tmp_path / "models--org--model"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee\n")
    (snapshot / "config.json").write_text(json.dumps({"vocab_size": 3}))
    assert directory("org/model", None, environ) == snapshot
    assert directory("org/model", "c0ffee", environ) == snapshot
    assert directory("org/model", "other", environ) is None
    info = read(directory("org/model", "main", environ))
    assert info is not None and info.vocab_size == 3


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/b"),
        ({"HF_HOME": "/c", "XDG_CACHE_HOME": "/d"}, "/c/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
    ],
)
def test_hub_cache(environ: dict[str, str], path: str) -> None:
    assert hub_cache(environ) == Path(path)


@pytest.mark.parametrize(
    ("environ", "asked", "path"),
    [
        ({"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/b"}, None, "/a"),
        ({"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/b"}, "/b", "/a"),  # not the flag: the variable
        ({"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/b/"}, "/b", "/a"),
        ({"HF_HUB_CACHE": "/a"}, "/c", "/c"),
        ({"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/b"}, "/c", "/c"),
        ({}, "/c", "/c"),
    ],
)
def test_the_flag_of_the_hub_cache_wins(environ: dict[str, str], asked: str | None, path: str) -> None:
    assert hub_cache(with_hub_cache(environ, asked and Path(asked))) == Path(path)


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert hub_cache({}) == Path("~/.cache/huggingface/hub")


def test_a_file_is_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_local("folder/model.safetensors")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").write_text("")
    assert is_local("folder/model.safetensors")


def test_directories_that_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(ArgumentValidation, match="no such directory"):
        check_directory("./x", tmp_path / "x")
    (tmp_path.parent / "model.safetensors").write_text("")
    with pytest.raises(ArgumentValidation, match=r"is a file, .*: give the folder of its model, "):
        check_directory("./model.safetensors", tmp_path.parent / "model.safetensors")
    with pytest.raises(
        ArgumentValidation, match=r"choose one, as `--gguf-file m-00001-of-00002.gguf` \(found: [^,]*\)$"
    ):
        (tmp_path / "m-00001-of-00002.gguf").write_text("")
        (tmp_path / "m-00002-of-00002.gguf").write_text("")
        check_directory("m", tmp_path)
    (tmp_path / "other.gguf").write_text("")
    with pytest.raises(ArgumentValidation, match=r"choose one, as `--gguf-file m-00001-of-00002\.gguf`"):
        check_directory("m", tmp_path)
    for file in tmp_path.glob("*.gguf"):
        file.unlink()
    with pytest.raises(ArgumentValidation, match=r"^m is empty: a model is a folder with config\.json"):
        check_directory("m", tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ArgumentValidation, match=r"notes.txt is a file, and no GGUF file: give a folder"):
        check_directory("m/notes.txt", tmp_path / "notes.txt")
    with pytest.raises(ArgumentValidation, match=r"no config\.json \(found: notes\.txt\)"):
        check_directory("m", tmp_path)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "config.json").touch()
    with pytest.raises(ArgumentValidation, match=r"no config\.json; did you mean .*/inner\?"):
        check_directory("m", tmp_path)
    (tmp_path / "inner" / "config.json").unlink()
    (tmp_path / "notes.txt").unlink()
    (tmp_path / "inner").rmdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.onnx").write_text("")
    with pytest.raises(
        ArgumentValidation, match=r"no weights, which are \*\.safetensors \(found: config\.json, model\.onnx\)"
    ):
        check_directory("m", tmp_path)
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(ArgumentValidation, match=r"pickled weights .*: convert .*download-weights m --auto-convert`"):
        check_directory("m", tmp_path)
    (tmp_path / "model.safetensors").write_text("")
    check_directory("m", tmp_path)


def test_one_of_several_gguf_files_must_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "m-Q8_0.gguf").touch()
    (tmp_path / "m-Q4_K_M.gguf").touch()
    (tmp_path / "config.json").write_text("{}")
    sentence = r"^m holds .*: choose one, as `--gguf-file m-Q4_K_M.gguf` \(found: m-Q4_K_M.gguf, m-Q8_0.gguf\)$"
    with pytest.raises(ArgumentValidation, match=sentence):
        check_directory("m", tmp_path)
    (tmp_path / "model.safetensors").touch()
    check_directory("m", tmp_path)


@pytest.mark.parametrize(
    ("start", "text"),
    [
        (
            "version https://git-lfs.github.com/spec/v1\noid",
            "is a pointer of Git LFS and not the file: run `git lfs pull`",
        ),
        ("\n<!DOCTYPE html>", "is a web page and not the file: its link has /resolve/"),
    ],
)
def test_what_a_download_wrote_instead_of_a_file(tmp_path: Path, start: str, text: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text(start)
    with pytest.raises(ArgumentValidation, match=re.escape(f"{tmp_path}/model.safetensors {text}")):
        check_directory("m", tmp_path)
    (tmp_path / "model.safetensors").write_text("")
    (tmp_path / "tokenizer.json").write_text(start)
    with pytest.raises(ArgumentValidation, match=re.escape(f"{tmp_path}/tokenizer.json {text}")):
        check_directory("m", tmp_path)
    (tmp_path / "m.gguf").write_text(start)
    with pytest.raises(ArgumentValidation, match=re.escape(f"{tmp_path}/m.gguf {text}")):
        check_gguf_file(f"{tmp_path}/m.gguf")


def test_a_gguf_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_0.gguf").touch()
    with pytest.raises(ArgumentValidation, match=r"no such file \(GGUF files in its folder: model-Q4_0\.gguf\)$"):
        check_gguf_file(f"{tmp_path}/model-q4.gguf")
    with pytest.raises(ArgumentValidation, match=r"no such file \(there is no folder .*/nowhere\)$"):
        check_gguf_file(f"{tmp_path}/nowhere/model.gguf")
    check_gguf_file(f"{tmp_path}/model-Q4_0.gguf")


def test_the_hub_model_that_an_adapter_changes(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    assert base_id(str(tmp_path)) == "org/base"
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "demo"}')
    assert base_id(str(tmp_path)) is None
    assert base_id("org/adapter") is None


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ArgumentValidation, match="holds an adapter and no model"):
        check_directory("m", tmp_path)


def test_the_size_of_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    info = read(tmp_path)
    assert info is not None and info.weight_bytes is None
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 7)
    (tmp_path / "model-2.safetensors").write_bytes(b"x" * 8)
    (tmp_path / "consolidated.safetensors").write_bytes(b"x" * 15)
    info = read(tmp_path)
    assert info is not None and info.weight_bytes == 15
    assert "15 B of weights" in info.summary()


def test_the_root_of_a_cached_repository_is_explained(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    with pytest.raises(ArgumentValidation, match=r"did you mean .*/snapshots/abc"):
        check_directory("m", tmp_path)


def test_a_config_that_is_a_pipe_or_a_device_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tmp_path / "config.json"
    config.symlink_to("/dev/zero")
    assert read(tmp_path) is None
    config.unlink()
    os.mkfifo(config)
    assert read(tmp_path) is None
    assert caplog.text.count("config.json is not a regular file") == 2


def test_older_files_of_codes_are_known_by_their_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "damaged.safetensors").write_text("?")
    words = {"m.qweight": np.zeros((64, 8), np.int32), "m.scales": np.zeros((2, 64), np.float16)}
    save_file({"m.weight": np.zeros((2, 2), np.float32)}, tmp_path / "a.safetensors")
    plain = read(tmp_path)
    save_file(words, tmp_path / "b.safetensors")
    packed = read(tmp_path)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    said = read(tmp_path)
    assert plain is not None
    assert packed is not None
    assert said is not None
    assert [info.quantize for info in (plain, packed, said)] == [None, "awq", "gptq"]


@pytest.mark.parametrize("count, text", [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB")])
def test_bytes_for_people(count: int, text: str) -> None:
    assert shown_bytes(count) == text


def test_a_misspelt_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama-1b").mkdir()
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert similar_directory("./lama-1b") == "./llama-1b"
    assert similar_directory("./llama-1B/") == "./llama-1b"
    assert similar_directory(f"{tmp_path}/llmaa-1b") == f"{tmp_path}/llama-1b"
    assert similar_directory("llama_1b") == "llama-1b"
    for other in ("./note.txt", "./qwen-1b", "./no-such/llama-1b", "/"):
        assert similar_directory(other) is None


def test_a_misspelt_model_of_the_cache(tmp_path: Path) -> None:
    for name in ("models--org--tiny-llama", "models--gpt2", "datasets--org--tiny-llamas"):
        (tmp_path / name).mkdir()
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    assert similar_cached("org/tiny-lama", environ) == "org/tiny-llama"
    assert similar_cached("Org/Tiny_Llama", environ) == "org/tiny-llama"
    assert similar_cached("gtp2", environ) == "gpt2"
    # What is in the cache under its name needs no other one.
    assert similar_cached("org/tiny-llama", environ) is None
    assert similar_cached("org/other", {"HF_HUB_CACHE": str(tmp_path / "absent")}) is None


@pytest.mark.parametrize(("model_id", "is_meant"), [("dmeo", True), ("Demo", True), ("demos", True), ("gpt2", False)])
def test_a_misspelt_demo(model_id: str, is_meant: bool) -> None:
    assert is_misspelt_demo(model_id) == is_meant
    assert not is_misspelt_demo("demo")
