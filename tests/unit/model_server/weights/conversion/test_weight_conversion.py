"""Conversion of pickled weights: what comes out, and that nothing which is no tensor gets in."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model_server.errors import StartupError
from model_server.weights.conversion import unpickle
from model_server.weights.conversion.unpickle import Refused, check_torch, convert_file
from model_server.weights.conversion.weights import convert, pickled_names, safetensors_name
from model_server.weights.download.download import download
from model_server.weights.locate import weight_files

EMBEDDING = torch.arange(12, dtype=torch.float32).view(4, 3)


class Trap:
    """Pickled, it runs a command when it is loaded without care."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._trace}",)


def test_everything_that_a_state_dict_may_hold(tmp_path: Path) -> None:
    large = torch.randn(8, 6)
    state = {
        "model.embed_tokens.weight": EMBEDDING,
        "lm_head.weight": EMBEDDING,
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "nan": torch.tensor([float("nan"), float("inf")]),
        "transposed": large.t(),
        "upper": large[:4],
        "lower": large[4:],
        "position_ids": torch.arange(6),
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "codes": torch.zeros(2, 2, dtype=torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "pytorch_model.bin")
    assert convert(tmp_path) == [tmp_path / "model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(state) - {"lm_head.weight"}
    for name, tensor in found.items():
        assert tensor.dtype == state[name].dtype
        assert tensor.shape == state[name].shape
        assert torch.equal(tensor.float(), state[name].float()) or name == "nan"
    assert found["nan"].isnan().tolist() == [True, False]
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "lm_head.weight": "model.embed_tokens.weight"}
    assert sorted(f.name for f in tmp_path.iterdir()) == ["model.safetensors", "pytorch_model.bin"]
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_several_files_get_an_index(tmp_path: Path) -> None:
    parts = {f"pytorch_model-0000{n}-of-00002.bin": {f"layer.{n}": torch.full((2,), float(n))} for n in (1, 2)}
    for name, state in parts.items():
        torch.save(state, tmp_path / name)
    index = {"weight_map": {key: name for name, state in parts.items() for key in state}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    torch.save({"x": torch.ones(1)}, tmp_path / "other.bin")  # not in the index
    assert [f.name for f in convert(tmp_path)] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    written = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert written == {
        "metadata": {"total_size": 16},
        "weight_map": {f"layer.{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)},
    }
    assert len(weight_files(tmp_path)) == 2


def test_names() -> None:
    assert safetensors_name("pytorch_model.bin") == "model.safetensors"
    assert safetensors_name("consolidated.00.pth") == "consolidated.00.safetensors"
    names = ["training_args.bin", "optimizer.pt", "rng_state_0.pth", "scheduler.pt", "b.pt", "a.pth"]
    assert pickled_names(names) == ["b.pt"]
    assert pickled_names([*names, "pytorch_model.bin"]) == ["pytorch_model.bin"]
    assert pickled_names(names[:4]) == []


def trapped(folder: Path, trace: Path) -> None:
    torch.save({"a": torch.ones(2), "b": Trap(trace)}, folder / "pytorch_model.bin")


def trapped_keys(folder: Path, trace: Path) -> None:
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Trap(trace)))
        archive.writestr("archive/version", "3")


def bare_pickle(folder: Path, trace: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Trap(trace)}))


def legacy(folder: Path, trace: Path) -> None:
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def program(folder: Path, trace: Path) -> None:
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        for name in ("data.pkl", "constants.pkl", "code/__torch__.py"):
            archive.writestr(f"archive/{name}", b"\x80\x02}.")


def compressed(folder: Path, trace: Path) -> None:
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")


def truncated(folder: Path, trace: Path) -> None:
    torch.save({"a": torch.ones(1000)}, folder / "whole.bin")
    (folder / "pytorch_model.bin").write_bytes((folder / "whole.bin").read_bytes()[:-200])
    (folder / "whole.bin").unlink()


def expanded(folder: Path, trace: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(10**6, 10**6)}, folder / "pytorch_model.bin")


def no_tensor(folder: Path, trace: Path) -> None:
    torch.save({"a": torch.ones(1), "step": 3}, folder / "pytorch_model.bin")


def sparse(folder: Path, trace: Path) -> None:
    torch.save({"a": torch.eye(2).to_sparse()}, folder / "pytorch_model.bin")


def a_list(folder: Path, trace: Path) -> None:
    torch.save([torch.ones(1)], folder / "pytorch_model.bin")


HOSTILE: dict[Callable[[Path, Path], None], str] = {
    trapped: r"holds more than tensors \(.*system\): it was not loaded, nothing in it was run",
    trapped_keys: r"holds more than tensors|is damaged",
    bare_pickle: r"not in torch's zip format",
    legacy: r"files from before torch 1\.6",
    program: r"is a TorchScript program",
    compressed: r"is compressed",
    truncated: r"is damaged or incomplete",
    expanded: r"would become 4000000000000 bytes of tensors",
    no_tensor: r"entry 'step' is no tensor but int",
    sparse: r"tensor 'a' is torch\.sparse_coo",
    a_list: r"holds no state dict",
}


@pytest.mark.parametrize(("make", "message"), HOSTILE.items(), ids=[make.__name__ for make in HOSTILE])
def test_what_is_refused(tmp_path: Path, make: Callable[[Path, Path], None], message: str) -> None:
    """In this process: how it ends in one of its own is the same, see below."""
    folder, trace = tmp_path / "model", tmp_path / "trace"
    folder.mkdir()
    make(folder, trace)
    with pytest.raises(Refused, match=message) as caught:
        convert_file(folder / "pytorch_model.bin", folder / "model.safetensors")
    assert str(folder / "pytorch_model.bin") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (folder / "model.safetensors").exists()
    assert not trace.exists()


@pytest.mark.long
def test_a_trap_in_the_second_file_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    folder, trace = tmp_path / "model", tmp_path / "trace"
    folder.mkdir()
    torch.save({"a": torch.ones(1)}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": Trap(trace)}, folder / "pytorch_model-00002-of-00002.bin")
    before = sorted(folder.iterdir())
    with pytest.raises(StartupError, match=r"00002-of-00002\.bin holds more than tensors"):
        convert(folder)
    assert sorted(folder.iterdir()) == before
    assert not trace.exists()


@pytest.mark.long
def test_same_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin"):
        torch.save({"x": torch.ones(1)}, tmp_path / name)
    with pytest.raises(StartupError, match=r"Key x was found in multiple files: b\.safetensors and a\.safetensors"):
        convert(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a.bin", "b.bin"]


def test_nothing_to_convert(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="holds no pickled weights to convert"):
        convert(tmp_path)


def test_two_files_of_one_name(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "model.bin"):
        torch.save({}, tmp_path / name)
    with pytest.raises(StartupError, match=r"two files would both become one of model\.safetensors"):
        convert(tmp_path)


def test_index_that_leads_outside(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "../pytorch_model.bin"}}')
    with pytest.raises(StartupError, match="names a file outside its directory"):
        convert(tmp_path)


def test_a_wrong_result_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(
        unpickle, "write", lambda target, tensors, metadata: save_file({"x": torch.zeros(2)}, target, metadata)
    )
    with pytest.raises(Refused, match="tensor 'x' is not the same after the conversion"):
        convert_file(tmp_path / "pytorch_model.bin", tmp_path / "model.safetensors")


@pytest.mark.parametrize("version", ["2.5.1", "1.13.0+cpu", "nonsense"])
def test_old_torch(version: str) -> None:
    with pytest.raises(Refused, match=r"install torch >= 2\.6"):
        check_torch(version)
    check_torch("2.6.0+cu124")
    check_torch("2.13.0")


def test_only_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"x": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(StartupError, match=r"never unpickles while serving: convert them once with .* --auto-convert"):
        download(str(tmp_path), None)
    assert download(str(tmp_path), None, auto_convert=True) == tmp_path
    before = (tmp_path / "model.safetensors").stat()
    download(str(tmp_path), None, auto_convert=True)
    assert (tmp_path / "model.safetensors").stat() == before
