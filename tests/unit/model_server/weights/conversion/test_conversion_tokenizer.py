"""Where a made tokenizer.json is put, and that everybody finds it there. The making itself: tests/contract."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import write_tokenizer

from model_server.errors import StartupError
from model_server.text.tokenizer import Tokenizer
from model_server.weights.conversion import tokenizer as tokenizer_files
from model_server.weights.conversion.tokenizer import ensure_tokenizer, has_tokenizer
from router.text import model_files
from wire import tokenizer_file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose tokenizer.json is yet to be made."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "vocab.json").write_text("{}")
    (path / "merges.txt").write_text("")
    return path


@pytest.fixture(autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Instead of the process that takes seconds: a tokenizer.json at once. Returns the folders it was asked about."""
    made = tmp_path_factory.mktemp("made")
    write_tokenizer(made)
    asked: list[Path] = []

    def run(source: Path, target: Path) -> None:
        asked.append(source)
        shutil.copy(made / "tokenizer.json", target)

    monkeypatch.setattr(tokenizer_files, "_run", run)
    return asked


def read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as a user whom no mode stops."""
    real = tempfile.TemporaryDirectory

    def refuse(*args: Any, dir: Path, **options: Any) -> Any:
        if Path(dir) == folder:
            raise OSError(errno.EROFS, "Read-only file system", str(dir))
        return real(*args, dir=dir, **options)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)


def test_beside_the_model(folder: Path, quick: list[Path]) -> None:
    assert tokenizer_file.find(folder) is None
    assert has_tokenizer(folder)
    assert ensure_tokenizer(folder) == folder / "tokenizer.json"
    assert ensure_tokenizer(folder) == folder / "tokenizer.json"
    assert quick == [folder]
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_in_the_cache_where_the_model_cannot_be_written(
    folder: Path, tmp_path: Path, quick: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Router and shard find the same file."""
    read_only(folder, monkeypatch)
    path = ensure_tokenizer(folder)
    assert path.is_relative_to(tmp_path / "hub")
    assert ensure_tokenizer(folder) == path
    assert len(quick) == 1
    assert model_files.load(str(folder), revision=None).tokenizer_json == path
    assert Tokenizer.load(folder).vocab_size > 256


@pytest.mark.parametrize("name", ["vocab.json", "tokenizer_config.json"])
def test_a_copy_of_other_files_is_not_taken(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_only(folder, monkeypatch)
    path = ensure_tokenizer(folder)
    (folder / name).write_text('{"a": 1}')
    os.utime(folder / name, (1, 1))
    assert tokenizer_file.find(folder) is None
    assert ensure_tokenizer(folder) != path


def test_no_place_at_all(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_only(folder, monkeypatch)
    (tmp_path / "hub").write_text("a file")
    with pytest.raises(StartupError, match=r"cannot write a tokenizer.json for \S+ \(.*\): set HF_HOME"):
        ensure_tokenizer(folder)


def test_nothing_to_make_one_of(folder: Path) -> None:
    (folder / "merges.txt").unlink()
    assert not has_tokenizer(folder)
    with pytest.raises(StartupError, match=r"no tokenizer.json, and nothing to make one of \(tokenizer.model, vocab"):
        ensure_tokenizer(folder)


def test_what_the_child_says_is_the_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real process, with an interpreter that refuses at once."""
    monkeypatch.undo()
    script = folder / "python"
    script.write_text("#!/bin/sh\nenv > \"$(dirname $0)/env\"\necho noise >&2\necho 'the reason'\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(StartupError, match=r"^the reason$"):
        ensure_tokenizer(folder)
    assert "hf_secret" not in (folder / "env").read_text()
    assert not (folder / "tokenizer.json").exists()
