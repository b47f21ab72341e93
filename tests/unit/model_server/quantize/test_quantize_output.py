"""Words as gptq packs them, and the tensors of a module."""

from __future__ import annotations

import pytest
import torch

from model_server.quantization.formats.common.words import unpack
from model_server.quantize.output import packed, tensors_of
from model_server.quantize.solver import Rounded


def test_the_words_of_the_format() -> None:
    assert [
        hex(word & 0xFFFFFFFF) for word in packed(torch.arange(8, dtype=torch.uint8).view(1, 8), 4)[0].tolist()
    ] == ["0x76543210"]
    assert packed(torch.full((1, 4), 255, dtype=torch.uint8), 8).tolist() == [[-1]]


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_packed_can_be_unpacked(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (5, 64), dtype=torch.uint8)
    assert torch.equal(unpack(packed(codes, bits), bits, 64, dense=True), codes)


def test_zero_points_are_stored_less_one() -> None:
    made = Rounded(
        codes=torch.zeros(16, 32, dtype=torch.uint8), scales=torch.ones(2, 16, dtype=torch.float16),
        groups=torch.zeros(32, dtype=torch.int32), middle=8, error=0.0,
    )  # fmt: skip
    found = tensors_of("a.b", made, 4)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "a.b.qweight": (4, 16), "a.b.qzeros": (2, 2), "a.b.scales": (2, 16), "a.b.g_idx": (32,),
    }  # fmt: skip
    assert set(found["a.b.qzeros"].flatten().tolist()) == {0x77777777}
