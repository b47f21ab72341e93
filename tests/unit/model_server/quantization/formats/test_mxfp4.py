"""MXFP4 experts to the bit, as transformers decodes them, and a model of gpt-oss's form that is stored so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity.protocol import PagedBatch, assert_equal_logits, prompts
from support.dict_reader import DictReader
from support.loading import load
from support.mxfp4 import decoded, mxfp4_checkpoint, random_blocks
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats import formats_of, read_matrix
from model_server.quantization.forms import Form
from model_server.quantization.forms.codes import Codes
from model_server.weights.matrix import MatrixSlice, Part

EXPERTS, OUT, IN = 3, 24, 96


def read(tensors: dict[str, Tensor], **options: object) -> Form:
    given: dict[str, object] = {"expert": 1, "num_columns": IN, "columns": (0, IN), "transposed": True} | options
    rows = given.pop("rows", ((0, OUT),))
    wanted = MatrixSlice(parts=(Part("m", rows, None),), **given)  # type: ignore[arg-type]
    return read_matrix(DictReader(tensors), wanted, formats_of({}))


def stored(blocks: Tensor, scales: Tensor) -> dict[str, Tensor]:
    return {"m_blocks": blocks, "m_scales": scales}


def test_the_words_of_the_format() -> None:
    """.25 and .5 with an exponent of -1; 6 and -6."""
    blocks, scales = torch.zeros(1, 2, 1, 16, dtype=torch.uint8), torch.tensor([[[126], [127]]], dtype=torch.uint8)
    blocks[0, 0, 0, 0], blocks[0, 1, 0, 0] = 0x21, 0xF7
    value = read(stored(blocks, scales), expert=0, num_columns=32, columns=(0, 32), rows=((0, 2),))
    assert value.dequantize(torch.float32)[:, :2].tolist() == [[0.25, 0.5], [6.0, -6.0]]


def test_experts_are_read_to_the_bit() -> None:
    blocks, scales = random_blocks(EXPERTS, OUT, IN)
    wanted = decoded(blocks, scales)
    form = read(stored(blocks, scales))
    assert isinstance(form, Codes) and form.group == 32
    assert torch.equal(form.dequantize(torch.float32), wanted[1])
    part = read(stored(blocks, scales), expert=2, rows=((4, 8), (12, 20)), columns=(48, 96))
    assert torch.equal(part.dequantize(torch.float32), wanted[2][[*range(4, 8), *range(12, 20)], 48:])


def test_exponents_at_their_ends() -> None:
    blocks, scales = random_blocks(1, OUT, IN)
    scales[0, 0, 0], scales[0, 1, 0] = 1, 250
    value = read(stored(blocks, scales), expert=0).dequantize(torch.float32)
    assert torch.equal(value, decoded(blocks, scales)[0]) and bool(torch.isfinite(value).all())


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"m_scales": torch.zeros(EXPERTS, OUT, 2, dtype=torch.uint8)}, {}, r"m_scales \[3, 24, 2\]; MXFP4 asks for"),
        ({"m_blocks": torch.zeros(EXPERTS, OUT, 3, 16)}, {}, r"are stored as F32, U8, not as bytes$"),
        (
            {"m_scales": torch.full((EXPERTS, OUT, 3), 255, dtype=torch.uint8)},
            {},
            r"^weight m_scales holds scales that are infinite or not numbers: its file is damaged$",
        ),
        ({}, {"expert": 3}, r"m_blocks holds 3 experts; the config asks for 3$"),
        ({}, {"rows": ((0, 25),)}, r"m_blocks has 24 outputs; the config asks for 25 at least$"),
        ({}, {"num_columns": 64, "columns": (0, 64)}, r"m_blocks has 96 inputs; the config asks for 64$"),
    ],
)
def test_what_does_not_fit(change: dict[str, Tensor], options: dict[str, object], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        read(stored(*random_blocks(EXPERTS, OUT, IN)) | change, **options)


def test_a_model_as_gpt_oss_is_published(tmp_path: Path) -> None:
    quantized, plain = mxfp4_checkpoint(tmp_path)
    runner, other = load(quantized), load(plain)
    sequences = prompts(runner.vocab_size)
    lengths = [len(sequence) for sequence in sequences]
    found, wanted = (PagedBatch(one, sequences, 16).step(lengths) for one in (runner, other))
    assert_equal_logits(found, wanted)
    assert runner.traits.weight_bytes is not None and other.traits.weight_bytes is not None
    assert runner.traits.weight_bytes < other.traits.weight_bytes
