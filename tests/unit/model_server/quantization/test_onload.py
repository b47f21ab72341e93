"""Plain matrices that are quantized while they are loaded."""

from __future__ import annotations

import logging

import pytest
import torch
from support.dict_reader import DictReader
from torch import Tensor

from model_server.quantization import onload
from model_server.quantization.forms import Plain
from model_server.quantization.forms.codes import Codes
from model_server.quantization.onload import QUANTIZERS
from model_server.quantization.scheme import Scheme
from model_server.weights.matrix import HeadOrder, MatrixSlice, Part

WEIGHT = torch.randn(32, 48, generator=torch.Generator().manual_seed(2))
READER = DictReader({"m.weight": WEIGHT, "t.weight": WEIGHT.t().contiguous(), "zero.weight": torch.zeros(4, 48)})
METHODS = pytest.mark.parametrize("method", ["eetq", "bitsandbytes"])


def by_hand(method: str) -> Tensor:
    largest = WEIGHT.abs().amax(1, keepdim=True)
    scale = (largest / 128).half().float() if method == "eetq" else largest / 127
    return (WEIGHT / scale).round().clamp(-128, 127) * scale


@METHODS
def test_every_row_has_its_scale(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rank has some of its columns, and whatever the size of the pieces that are read."""
    scheme = Scheme(method, quantize=QUANTIZERS[method])
    order = HeadOrder(8, 8)
    for piece_bytes in (1, 5000, 2**20):
        monkeypatch.setattr(onload, "PIECE_BYTES", piece_bytes)
        part = Part("m", ((0, 8), (16, 32)), 32, order)
        wanted = MatrixSlice(parts=(part,), columns=(8, 40))
        form = scheme.read(READER, wanted)
        assert isinstance(form, Codes)
        assert form.nbytes == 24 * 32 + 24 * (form.scales.itemsize + 1)
        kept = torch.cat([by_hand(method)[:8], by_hand(method)[16:]])
        assert torch.equal(form.dequantize(torch.float32), order.apply(kept)[:, 8:40])


@METHODS
def test_matrices_that_are_stored_the_other_way_round_and_zeros(method: str) -> None:
    scheme = Scheme(method, quantize=QUANTIZERS[method])
    turned = scheme.read(READER, MatrixSlice(parts=(Part("t", ((0, 32),), 32),), columns=(8, 40), transposed=True))
    assert torch.equal(turned.dequantize(torch.float32), by_hand(method)[:, 8:40])
    zero = scheme.read(READER, MatrixSlice(parts=(Part("zero", ((0, 4),), 4),), columns=(0, 48)))
    assert torch.equal(zero.dequantize(torch.float32), torch.zeros(4, 48))


@METHODS
def test_what_is_spared(method: str) -> None:
    scheme = Scheme(method, quantize=QUANTIZERS[method])
    form = scheme.read(READER, MatrixSlice(parts=(Part("m", ((0, 32),), 32),), columns=(0, 48)), as_stored=True)
    assert torch.equal(form.dequantize(torch.float32), WEIGHT)


@METHODS
def test_modules_that_the_config_names(method: str) -> None:
    """One of two matrices that are read as one."""
    reader = DictReader({"a.q_proj.weight": WEIGHT, "a.k_proj.weight": WEIGHT})
    scheme = Scheme(method, quantize=QUANTIZERS[method], skipped=("k_proj",))
    parts = tuple(Part(f"a.{name}_proj", ((0, 32),), 32) for name in "qk")
    form = scheme.read(reader, MatrixSlice(parts=parts, columns=(0, 48)))
    assert torch.equal(form.dequantize(torch.float32), torch.cat([by_hand(method), WEIGHT]))
    assert isinstance(form.rows(32, 64), Plain)


def test_the_line_of_the_log_counts_modules(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reader = DictReader({f"{name}.weight": WEIGHT for name in "abcd"})
    scheme = Scheme("eetq", quantize=QUANTIZERS["eetq"], skipped=("d",))

    def read(*names: str, as_stored: bool = False) -> None:
        parts = tuple(Part(name, ((0, 32),), 32) for name in names)
        scheme.read(reader, MatrixSlice(parts=parts, columns=(0, 48)), as_stored=as_stored)

    read("a", "b", "d")
    scheme.report(torch.bfloat16)
    read("b", "c", as_stored=True)
    read("c", as_stored=True)  # as a tied head is
    scheme.report(torch.bfloat16)
    Scheme().report(torch.bfloat16)
    assert caplog.messages == [
        "Weights: eetq on load, 8 bits, one group a row; 1 module plain; activations in bfloat16",
        "Weights: eetq on load, 8 bits, one group a row; 3 modules plain; activations in bfloat16",
    ]
