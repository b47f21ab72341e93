"""What is wrong with a checkpoint is found before it is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model_server.errors import StartupError
from model_server.weights.checkpoint import MAX_SIZE, examine
from model_server.weights.locate import weight_files

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "rope_theta": 1e11, "sliding_window": -1}


def make(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file({"a": torch.zeros(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.zeros(2)}, folder / "model-2.safetensors")
    return folder


def with_index(folder: Path, weight_map: object) -> Path:
    make(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_good(tmp_path: Path) -> None:
    found = examine(make(tmp_path))
    assert [f.name for f in found.headers] == ["model-1.safetensors", "model-2.safetensors"]
    assert found.file_bytes == sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert not found.needs_bfloat16
    assert examine(make(tmp_path, model_type="gemma3_text")).needs_bfloat16
    assert examine(make(tmp_path, model_type="mamba")).needs_bfloat16
    assert not examine(make(tmp_path, model_type=None)).needs_bfloat16


def test_the_type_of_most_bytes(tmp_path: Path) -> None:
    make(tmp_path)
    assert examine(tmp_path).stored_in == "F32"
    save_file({"c": torch.zeros(9, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors")
    assert examine(tmp_path).stored_in == "BF16"  # 18 bytes of it, 8 of float32
    save_file({"d": torch.zeros(99, dtype=torch.int32)}, tmp_path / "model-2.safetensors")
    assert examine(tmp_path).stored_in == "BF16"  # codes of quantized weights are no type of activations
    save_file({"c": torch.zeros(9, dtype=torch.uint8)}, tmp_path / "model-1.safetensors")
    assert examine(tmp_path).stored_in is None


def test_infinity_that_is_no_size(tmp_path: Path) -> None:
    """mamba2's own configs hold one."""
    examine(make(tmp_path, time_step_limit=[0.0, float("inf")], time_step_max=float("inf"), attn_config={"x": 1}))


@pytest.mark.parametrize("value", [-1, -(10**30), 10**30, MAX_SIZE + 1, float("nan"), float("inf"), -0.5])
@pytest.mark.parametrize("nested", [False, True])
def test_absurd_sizes(tmp_path: Path, value: float, nested: bool) -> None:
    block = {"hidden_size": value}
    folder = make(tmp_path, text_config=block) if nested else make(tmp_path, **block)
    with pytest.raises(StartupError, match=r"config\.json: `hidden_size` is .*, which is impossible"):
        examine(folder)


def test_more_layers_than_tensors(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"`num_hidden_layers` is 1000000, but the weight files hold 2 tensors"):
        examine(make(tmp_path, num_hidden_layers=10**6))


def test_index_that_promises_too_much(tmp_path: Path) -> None:
    folder = with_index(tmp_path, {"a": "model-1.safetensors", "c": "model-2.safetensors"})
    with pytest.raises(StartupError, match=r"lists 'c' in model-2\.safetensors, which lacks it \(1 such tensors\)"):
        examine(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../model-1.safetensors", "/etc/passwd", "sub/model-1.safetensors", "..", ".", "", "config.json",
        "a\\b.safetensors", "model-1.safetensors\0", "tokenizer.json",
    ],
)  # fmt: skip
def test_index_that_leads_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(StartupError, match="names a file outside its directory or of another kind"):
        examine(with_index(tmp_path, {"a": name}))


@pytest.mark.parametrize("weight_map", [{}, [], 3, {"a": ["model-1.safetensors"]}, {"a": None}])
def test_index_of_another_form(tmp_path: Path, weight_map: object) -> None:
    with pytest.raises(StartupError, match="has no usable `weight_map`"):
        examine(with_index(tmp_path, weight_map))


def test_an_index_that_is_left_from_other_files(tmp_path: Path) -> None:
    """transformers reads the whole file beside it, too."""
    folder = with_index(tmp_path, {"a": "model-7.safetensors"})
    (folder / "model-1.safetensors").rename(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert [path.name for path in examine(folder).headers] == ["model.safetensors"]
    index = {"weight_map": {"a": "model.safetensors", "b": "model-7.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in examine(folder).headers] == ["model.safetensors"]


def test_links(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    folder = make(tmp_path / "model")
    (folder / "model-3.safetensors").symlink_to(secret)
    with pytest.raises(StartupError, match=r"model-3\.safetensors is a link to .*secret, which is not a weight file"):
        examine(folder)
    (folder / "model-3.safetensors").unlink()
    (folder / "model-3.safetensors").symlink_to("model-3.safetensors")
    with pytest.raises(StartupError, match="is a link that leads nowhere"):
        examine(folder)
    (folder / "model-3.safetensors").unlink()
    (folder / "model-3.safetensors").symlink_to("/dev/zero")
    with pytest.raises(StartupError, match="is a link to /dev/zero"):
        examine(folder)


def test_links_of_a_snapshot_and_of_a_store(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    make(snapshot)
    (snapshot / "model-1.safetensors").rename(blobs / "0123abcd")
    (snapshot / "model-1.safetensors").symlink_to("../../blobs/0123abcd")
    store = make(tmp_path / "store")
    (snapshot / "model-2.safetensors").unlink()
    (snapshot / "model-2.safetensors").symlink_to(store / "model-2.safetensors")
    assert len(examine(snapshot).headers) == 2


def test_links_into_the_blobs_of_a_hub_cache(tmp_path: Path) -> None:
    """From any folder, also by way of a snapshot."""
    snapshot, blobs = (tmp_path / "models--a--b" / name for name in ("snapshots/abc", "blobs"))
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    folder = make(tmp_path / "model")
    for number in (1, 2):
        name = f"model-{number}.safetensors"
        (folder / name).rename(blobs / f"{number}abcd")
        (snapshot / name).symlink_to(f"../../blobs/{number}abcd")
        (folder / name).symlink_to(snapshot / name if number == 1 else blobs / f"{number}abcd")
    assert len(examine(folder).headers) == 2


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(make(tmp_path) / "model-3.safetensors")
    with pytest.raises(StartupError, match="not a regular file"):
        examine(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\xff", '{"a": ' + "9" * 5000 + "}"])
def test_config_that_is_none(tmp_path: Path, text: str) -> None:
    (make(tmp_path) / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StartupError, match=r"config\.json (is not valid JSON|does not hold a JSON object)") as caught:
        examine(tmp_path)
    assert len(str(caught.value)) < 600


def test_huge_json(tmp_path: Path) -> None:
    with (make(tmp_path) / "config.json").open("wb") as file:
        file.truncate(2**36)
    with pytest.raises(StartupError, match="is larger than 64 MiB"):
        examine(tmp_path)


def test_numbered_files_must_be_whole(tmp_path: Path) -> None:
    make(tmp_path)
    for number in (1, 3):
        save_file({f"x{number}": torch.zeros(1)}, tmp_path / f"model-0000{number}-of-00003.safetensors")
    with pytest.raises(StartupError, match=r"lacks 1 of 3 weight files, first model-00002-of-00003\.safetensors"):
        examine(tmp_path)


def test_second_copies_are_left_alone(tmp_path: Path) -> None:
    make(tmp_path)
    for name in ("consolidated.safetensors", "consolidated.00.safetensors", "model-1.fp16.safetensors"):
        save_file({"a": torch.zeros(2)}, tmp_path / name)
    assert [f.name for f in examine(tmp_path).headers] == ["model-1.safetensors", "model-2.safetensors"]
    for file in tmp_path.glob("model-*"):
        file.unlink()
    assert [f.name for f in weight_files(tmp_path)] == ["consolidated.safetensors"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_device_or_a_pipe_among_the_small_files_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = make(tmp_path) / name
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")
    with pytest.raises(StartupError, match=f"{name} is not a regular file"):
        examine(tmp_path)
