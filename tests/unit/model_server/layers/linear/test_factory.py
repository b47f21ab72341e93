"""Which kind of product a matrix gets."""

from __future__ import annotations

import pytest
import torch

from model_server.distributed.group import ProcessGroup
from model_server.layers.linear import factory
from model_server.layers.linear.decode_gemm import BUCKETS, DecodeGemmLinear
from model_server.layers.linear.dequantizing import DequantizingLinear, SplitLinear
from model_server.layers.linear.factory import LinearFactory
from model_server.layers.linear.linear import Linear, TorchLinear
from model_server.layers.linear.onednn import OneDnnLinear, weight_packer
from model_server.layers.linear.packed import PackedLinear
from model_server.quantization.forms import Form, Plain, Stacked
from model_server.quantization.forms.codes import Codes

CPU = torch.device("cpu")


def kind(linears: LinearFactory, rows: int, columns: int) -> type:
    return type(linears.make(Plain(torch.zeros(rows, columns, dtype=linears.dtype))))


@pytest.mark.parametrize("panels", [True, False])
def test_on_a_cpu(panels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not panels:
        monkeypatch.setattr(factory.cpp, "usable", lambda device, dtype: False)
    elif not factory.cpp.usable(CPU, torch.float32):
        pytest.skip("no C++ operators on this machine")
    linears = LinearFactory(CPU, torch.float32)
    large = TorchLinear if weight_packer(CPU, torch.float32) is None else OneDnnLinear
    assert kind(linears, 1000, 100) is (PackedLinear if panels else large)
    assert kind(linears, 10, 10) is (PackedLinear if panels else TorchLinear)
    assert kind(linears, 1000, 101) is large  # panels hold pairs
    assert kind(LinearFactory(CPU, torch.float16), 1000, 100) is TorchLinear
    linears.measure(ProcessGroup())


def test_matrices_of_one_shape_share_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "_kernels", lambda device, dtype: [[torch.nn.functional.linear]] * len(BUCKETS))
    linears = LinearFactory(CPU, torch.float16)
    shapes = [(1024, 1024), (2048, 1024), (1024, 1024)]
    made = [linears.make(Plain(torch.zeros(shape, dtype=torch.float16))) for shape in shapes]
    assert all(isinstance(linear, DecodeGemmLinear) for linear in made)
    assert [gemm.shape for gemm in linears._gemms.values()] == shapes[:2]
    assert kind(linears, 16, 16) is TorchLinear  # no time worth the measurement
    transposed = Plain(torch.zeros(1024, 2048, dtype=torch.float16).t())
    assert isinstance(linears.make(transposed), TorchLinear)


def test_quantized_matrices_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels get what they take, each part of a split matrix by itself; the rest is decoded by torch."""
    made: list[Form] = []

    def kernels(form: Form, bias: torch.Tensor | None) -> Linear | None:
        if form.shape[0] > 4:
            return None
        made.append(form)
        return TorchLinear(form.dequantize(torch.float16), bias)

    monkeypatch.setattr(factory, "_decoding_kernels", lambda device, dtype: kernels)
    linears = LinearFactory(CPU, torch.float16)  # the C++ operators leave float16 to others
    small, large = (
        Codes(torch.ones(n, 8, dtype=torch.uint8), torch.ones(n, 1), torch.zeros(n, 1, dtype=torch.uint8), 16, 16)
        for n in (4, 8)
    )
    assert isinstance(linears.make(small), TorchLinear)
    assert isinstance(linears.make(large), DequantizingLinear)
    split = linears.make(Stacked((small, large)), torch.arange(12).half())
    assert isinstance(split, SplitLinear)
    assert made == [small, small]
    assert torch.equal(split(torch.zeros(1, 16).half())[0], torch.arange(12).half())


def test_no_kernels_on_a_cpu() -> None:
    assert factory._decoding_kernels(CPU, torch.bfloat16) is None
