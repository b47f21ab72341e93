"""Files in several parts: all of them, as they were written, or one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.gguf_files import write_gguf
from support.tiny_models import tiny_checkpoint

from model_server.errors import StartupError
from model_server.weights.gguf.prepare import prepare
from model_server.weights.locate import weight_files
from wire.quantization.gguf import file_of, parts_of, without_later_parts

NAMES = [f"m-{part:05d}-of-00004.gguf" for part in range(1, 5)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    source = tiny_checkpoint("llama", folder / "source", num_hidden_layers=2)
    write_gguf(source, folder / "m.gguf", "F16", most_tensors=6)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    for name in NAMES:
        shutil.copy(written / name, tmp_path)
    return tmp_path


def test_all_parts_are_read(folder: Path) -> None:
    made = prepare(folder / NAMES[0], folder / "cache")
    assert [path.resolve().name for path in weight_files(made)] == NAMES
    assert json.loads((made / "config.json").read_text())["num_hidden_layers"] == 2


def test_any_part_names_the_file(folder: Path) -> None:
    assert parts_of(NAMES[2]) == NAMES
    assert file_of(str(folder / NAMES[2]), None, folder) == folder / NAMES[0]
    assert parts_of("m.gguf") == ["m.gguf"]
    assert without_later_parts(["a.gguf", *NAMES]) == ["a.gguf", NAMES[0]]


def refused(file: Path) -> str:
    with pytest.raises(StartupError) as caught:
        prepare(file, file.parent / "cache")
    return str(caught.value)


def test_a_part_is_missing(folder: Path) -> None:
    (folder / NAMES[3]).unlink()
    assert f"is one of 4 parts, of which there is no {NAMES[3]} beside it" in refused(folder / NAMES[0])


def test_a_part_under_another_name(folder: Path) -> None:
    assert "they must keep the names that they had" in refused((folder / NAMES[0]).rename(folder / "m.gguf"))


def test_a_part_in_another_s_place(folder: Path) -> None:
    shutil.copy(folder / NAMES[2], folder / NAMES[1])
    assert f"{NAMES[1]} is not the part of" in refused(folder / NAMES[0])
