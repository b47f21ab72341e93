"""Configs that say what is not so of their files: the tensors decide, or one line names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quantized import quantize_folder
from support.tiny_models import tiny_checkpoint
from torch import Tensor

from model_server.attention.choice import AttentionChoice
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.models.load import load_runner
from model_server.models.model import describe
from model_server.quantization.scheme import resolve
from model_server.weights.checkpoint import examine
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import SafetensorsReader

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of gptq: 4 bits, symmetric, groups of 32, in an order of activations, version 1."""
    root = tmp_path_factory.mktemp("gptq")
    return quantize_folder(tiny_checkpoint("llama", root / "source"), root, "gptq", act_order=True)


def with_config(folder: Path, copy: Path, said: dict[str, Any] | None) -> Path:
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(config if said is None else {**config, "quantization_config": said}))
    return copy


def matrices(folder: Path) -> dict[str, Tensor]:
    checkpoint = examine(folder)
    scheme = resolve(checkpoint)
    names = [name for header in checkpoint.headers.values() for name in header.tensors if name.endswith(".qweight")]
    found = {}
    with SafetensorsReader(checkpoint.headers, dtype=torch.float32, device=CPU) as reader:
        for name in names:
            module = name.removesuffix(".qweight")
            num_rows, num_columns = reader.shape(f"{module}.scales")[1], reader.shape(f"{module}.g_idx")[0]
            wanted = MatrixSlice(parts=(Part(module, ((0, num_rows),), num_rows),), columns=(0, num_columns))
            found[module] = scheme.read(reader, wanted).dequantize(torch.float32)
    return found


@pytest.mark.parametrize(
    "lie",
    [
        None,  # and no word of it either
        {"desc_act": False},
        {"desc_act": True, "group_size": 64},
        {"bits": 8},
        {"checkpoint_format": "gptq_v2", "sym": True},
        {"quant_method": "awq", "version": "gemm"},
        {"modules_to_not_convert": ["q_proj", "mlp"]},
        {"modules_in_block_to_quantize": [["no such module"]]},
    ],
)
def test_the_tensors_decide(lie: dict[str, Any] | None, folder: Path, tmp_path: Path) -> None:
    truth = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}
    found = matrices(with_config(folder, tmp_path / "copy", None if lie is None else truth | lie))
    expected = matrices(folder)
    assert len(found) == len(expected) > 0
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_scale_that_is_missing(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    missing = next(name for name in tensors if name.endswith("q_proj.scales"))
    del tensors[missing]
    copy = with_config(folder, tmp_path / "copy", {"quant_method": "gptq", "bits": 4})
    (copy / "model.safetensors").unlink()
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(StartupError, match=rf"^weight {missing} does not exist$"):
        load_runner(describe(examine(copy)), Placement(CPU, torch.float32), AttentionChoice("reference", CPU))


def test_plain_weights_that_a_config_calls_quantized(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    plain = with_config(folder.parent / "plain", folder.parent / "lying", {"quant_method": "gptq", "bits": 4})
    load_runner(describe(examine(plain)), Placement(CPU, torch.float32), AttentionChoice("reference", CPU))
    line = next(message for message in caplog.messages if message.startswith("Weights: "))
    assert line.startswith("Weights: gptq, none found; ")
