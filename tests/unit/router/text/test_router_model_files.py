"""Where the model's files are found and what is read of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from router.errors import StartupError
from router.text import model_files


def write(folder: Path, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text("{}")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def load(folder: Path, **options: Any) -> model_files.ModelFiles:
    return model_files.load(str(folder), revision=None, **options)


def test_a_folder_with_the_least(tmp_path: Path) -> None:
    files = load(write(tmp_path / "m"))
    assert files.folder == (tmp_path / "m").resolve()
    assert (files.sha, files.max_positions, files.tokenizer_max_length) == (None, None, None)
    assert (files.templates, files.named_tokens) == ({}, {})


def test_lengths(tmp_path: Path) -> None:
    folder = write(tmp_path, config={"max_position_embeddings": 4096}, tokenizer_config={"model_max_length": 1e30})
    files = load(folder)
    assert files.max_positions == 4096 and files.tokenizer_max_length is None
    folder = write(tmp_path, config={"text_config": {"n_positions": 9}}, tokenizer_config={"model_max_length": 512})
    files = load(folder)
    assert files.max_positions == 9 and files.tokenizer_max_length == 512


def test_named_tokens_are_texts_or_objects(tmp_path: Path) -> None:
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "extra": "x"}
    folder = write(tmp_path, tokenizer_config=tokens, special_tokens_map={"unk_token": "<u>", "eos_token": "<e>"})
    assert load(folder).named_tokens == {"bos_token": "<s>", "eos_token": "<e>", "unk_token": "<u>"}
    write(tmp_path, tokenizer_config={**tokens, "added_tokens_decoder": {}})
    assert load(folder).named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_templates_and_their_precedence(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "tools"}]}
    folder = write(tmp_path, tokenizer_config=config, processor_config={"chat_template": "processor"})
    assert load(folder).templates == {"default": "config", "tool_use": "tools"}
    write(tmp_path, chat_template={"chat_template": "json"})
    assert load(folder).templates == {"default": "json", "tool_use": "tools"}
    (tmp_path / "chat_template.jinja").write_text("jinja")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert load(folder).templates == {"default": "jinja", "rag": "rag", "tool_use": "tools"}
    own = tmp_path / "own.txt"
    own.write_text("own")
    assert load(folder, chat_template=str(own)).templates == {"default": "own"}


def test_another_tokenizer_config(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", tokenizer_config={"chat_template": "theirs"})
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"chat_template": "ours", "bos_token": "B"}))
    files = load(folder, tokenizer_config_path=str(path))
    assert files.templates == {"default": "ours"} and files.named_tokens == {"bos_token": "B"}


def test_a_hub_id_is_looked_up_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    sha = "a" * 40
    write(tmp_path / "models--some--model" / "snapshots" / sha)
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text(sha)
    files = model_files.load("some/model", revision=None)
    assert files.sha == sha and files.tokenizer_json.is_file()
    with pytest.raises(StartupError, match=r"other/model \(revision v2\).*download-weights"):
        model_files.load("other/model", revision="v2")
    with pytest.raises(StartupError, match="neither a directory nor a hub id"):
        model_files.load("../no/such//thing", revision=None)


def test_a_directory_is_one_whatever_the_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As launcher and shards see it; also behind a `~` that no shell has replaced."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = write(tmp_path / "m")
    assert model_files.locate(str(folder), "main") == folder.resolve()
    assert model_files.locate("~/m", None) == folder.resolve()


def test_the_demo_model_ships_with_us() -> None:
    files = model_files.load("demo", revision=None)
    assert files.tokenizer_json.is_file()


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path)
    (folder / "config.json").write_text(content)
    with pytest.raises(StartupError, match=r"config\.json"):
        load(folder)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no tokenizer\.json"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"])
def test_a_pipe_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(StartupError, match=f"{name} is not a regular file"):
        load(tmp_path)
