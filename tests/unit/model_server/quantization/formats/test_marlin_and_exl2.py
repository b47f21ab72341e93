"""marlin and exl2 files, by writers that place one number after the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from parity.protocol import PagedBatch, assert_equal_logits, prompts
from support.dict_reader import DictReader
from support.loading import load
from support.marlin_and_exl2 import exl2, marlin, store_as
from support.quantized_folder import Stored, quantize_folder
from support.tiny_models import tiny_checkpoint
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats import formats_of, read_matrix
from model_server.quantization.forms import Form
from model_server.quantization.forms.codes import Codes
from model_server.weights.matrix import MatrixSlice, Part

ROWS, COLUMNS = 128, 192


def read(tensors: Stored, columns: tuple[int, int] = (0, COLUMNS), rows: tuple[int, int] = (0, ROWS)) -> Form:
    wanted = MatrixSlice(parts=(Part("m", (rows,), ROWS),), columns=columns, num_columns=COLUMNS)
    return read_matrix(DictReader({f"m.{name}": tensor for name, tensor in tensors.items()}), wanted, formats_of({}))


# Marlin.


def test_the_first_word_of_marlin() -> None:
    codes = (3 * torch.arange(16) + torch.arange(64).unsqueeze(1)) % 16
    assert marlin(codes, torch.ones(64, 1))["B"][0, 0].item() & 0xFFFFFFFF == 0x3BB30880


@pytest.mark.parametrize("group", [64, COLUMNS])
def test_marlin_is_read_to_the_bit(group: int) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (ROWS, COLUMNS), generator=generator)
    scales = torch.rand(ROWS, COLUMNS // group, generator=generator).half().float()
    wanted = (codes - 8) * scales.repeat_interleave(group, 1)
    tensors = marlin(codes, scales)
    form = read(tensors)
    assert isinstance(form, Codes) and form.is_packed and form.group == group
    assert torch.equal(form.dequantize(torch.float32), wanted)
    assert torch.equal(read(tensors, rows=(20, 90)).dequantize(torch.float32), wanted[20:90])
    assert torch.equal(read(tensors, columns=(96, 192)).dequantize(torch.float32), wanted[:, 96:])


def test_marlin_of_another_size() -> None:
    tensors = marlin(torch.zeros(64, COLUMNS).long(), torch.ones(64, 1))
    with pytest.raises(StartupError, match=r"^weight m\.B has shape \[12, 128\]; 4 bits in groups of 192"):
        read(tensors)


# ExLlamaV2.


@pytest.mark.parametrize("bits", [[4], [2, 3, 4], [8, 6, 5, 4, 3, 2]])
def test_exl2_is_read_to_the_bit(bits: list[int]) -> None:
    tensors, exact = exl2(torch.randn(ROWS, COLUMNS), bits)
    form = read(tensors)
    assert isinstance(form, Codes) and form.is_packed is (max(bits) <= 4)
    assert torch.equal(form.dequantize(torch.float32), exact)
    assert torch.equal(read(tensors, rows=(8, 40)).dequantize(torch.float32), exact[8:40])


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("q_groups", torch.tensor([7, 0], dtype=torch.int16), r"q_groups does not divide the 24 words"),
        ("q_groups", torch.tensor([4, 0, 4, 0], dtype=torch.int16), r"q_groups does not divide"),
        ("q_invperm", torch.zeros(COLUMNS, dtype=torch.int32), r"q_invperm does not name each input once"),
        ("q_invperm", torch.arange(8, dtype=torch.int32), r"q_weight holds codes of 192 inputs, and q_invperm 8"),
        ("q_scale", torch.zeros(2, 16, dtype=torch.int32), r"q_scale has shape \[2, 16\]; 6 groups of 128 outputs"),
    ],
)
def test_exl2_that_does_not_fit(name: str, tensor: Tensor, message: str) -> None:
    tensors, _ = exl2(torch.randn(ROWS, COLUMNS), [4])
    tensors["q_weight"] = torch.cat([tensors["q_weight"]])
    with pytest.raises(StartupError, match=message):
        read(tensors | {name: tensor})


@pytest.mark.parametrize("method", ["exl2", "marlin"])
def test_a_model_gives_the_logits_of_the_decoded_weights(method: str, tmp_path: Path) -> None:
    plain = tiny_checkpoint("llama", tmp_path / "plain")
    quantized, decoded = quantize_folder(
        plain, tmp_path, store_as(method), {"quant_method": method, "bits": 4, "group_size": -1}
    )
    if method == "exl2":  # its names are enough
        config = json.loads((quantized / "config.json").read_text())
        del config["quantization_config"]
        (quantized / "config.json").write_text(json.dumps(config))
    runner, other = load(quantized), load(decoded)
    sequences = prompts(runner.vocab_size)
    lengths = [len(sequence) for sequence in sequences]
    found, wanted = (PagedBatch(one, sequences, 16).step(lengths) for one in (runner, other))
    assert_equal_logits(found, wanted)
