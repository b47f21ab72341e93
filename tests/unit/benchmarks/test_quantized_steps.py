"""Quantized weights of the benchmarks: what the 4-bit checkpoint holds, and what a comparison reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.dict_reader import DictReader

from benchmarks.engine import quantized as module
from benchmarks.engine.steps import Cell, cells
from benchmarks.peers import quantized
from model_server.quantization.formats.gptq import GptqFormat
from model_server.weights.matrix import MatrixSlice, Part

MILLISECONDS = {"bfloat16": 6.0, "int8": 3.0, "int4": 2.0}


@pytest.mark.parametrize("num_columns", [256, 192], ids=["whole groups", "a shorter last group"])
def test_the_4_bit_checkpoint_reads_as_weights_rounded_to_the_nearest(tmp_path: Path, num_columns: int) -> None:
    plain, name = tmp_path / "plain", "model.layers.0.mlp.up_proj"
    plain.mkdir()
    weight = torch.randn(16, num_columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3] = 0
    others = {"model.embed_tokens.weight": weight, "model.layers.0.input_layernorm.weight": weight[0].clone()}
    save_file({f"{name}.weight": weight.clone(), **others}, plain / "model.safetensors")
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (plain / file).write_text("{}")
    folder = quantized.gptq_checkpoint(plain, tmp_path / "gptq")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    for other, tensor in others.items():
        assert torch.equal(tensors[other], tensor)
    wanted = MatrixSlice(parts=(Part(name, ((0, 16),), 16),), columns=(0, num_columns), num_columns=num_columns)
    read = GptqFormat(config).read(DictReader(tensors), wanted).dequantize(torch.float32)
    steps = tensors[f"{name}.scales"].float().t().repeat_interleave(quantized.GROUP, 1)[:, :num_columns]
    assert tensors[f"{name}.scales"].shape == (2, 16)
    assert ((read - weight.float()).abs() <= steps * 0.51).all()
    assert torch.unique(read[0, :128]).numel() > 8
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert quantized.gptq_checkpoint(plain, folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


class FakeSide:
    """Takes as long as its precision says, one run more than twice as long."""

    turns: list[str] = []
    threads = 2

    def __init__(self, model: str, dtype: str, variables: Mapping[str, str], *, cpu_time: bool) -> None:
        self.precision = dtype

    def measure(self, cell: Cell, seconds: float) -> list[float]:
        self.turns.append(self.precision)
        return [MILLISECONDS[self.precision], 20.0, 20.0]

    def close(self) -> None:
        pass


def test_precisions_take_turns_and_are_reported_beside_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "Side", FakeSide)
    monkeypatch.setattr(FakeSide, "turns", [])
    out = tmp_path / "quantized.json"
    module.measure(["135M"], ["int8", "int4"], cells([1], prefill=False), seconds=1.0, turns=2, cpu_time=False, out=out)
    assert FakeSide.turns == ["bfloat16", "int8", "int4", "int4", "int8", "bfloat16"]
    found = json.loads(out.read_text())["cells"]
    assert [(r["precision"], r["ms"], r["ratio"], r["median_ratio"]) for r in found] == [
        ("bfloat16", 6.0, 1.0, 1.0), ("int8", 3.0, 2.0, 1.0), ("int4", 2.0, 3.0, 1.0)
    ]  # fmt: skip
    table = "| | decode 1 |\n|---|---:|\n| 135M, bfloat16 | 6.0 ms |\n| 135M, int8 | 3.0 ms, 2.00 |"
    assert table in capsys.readouterr().out
