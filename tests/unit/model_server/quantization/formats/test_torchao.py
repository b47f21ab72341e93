"""Files of torchao are read to the bit as the library reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.dict_reader import DictReader
from support.torchao_golden import SIZE, golden
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats import formats_of, read_matrix
from model_server.quantization.forms import Form
from model_server.quantization.forms.codes import Codes
from model_server.quantization.forms.float8 import Fp8
from model_server.weights.matrix import HeadOrder, MatrixSlice, Part
from model_server.weights.reader import Range

CASES = ("int8", "int8-groups", "int4", "int4-zeros", "fp8", "fp8-tensor")
DYNAMIC = {"quant_type": {"default": {"_type": "Float8DynamicActivationFloat8WeightConfig"}}}


def tensors_of(case: str) -> dict[str, Tensor]:
    return {f"m.{name}": tensor for name, tensor in golden(case).items() if name != "float32"}


def read(tensors: dict[str, Tensor], *rows: Range, config: dict[str, Any] | None = None, **options: Any) -> Form:
    part = Part("m", rows or ((0, SIZE[0]),), SIZE[0], options.pop("order", None))
    given: dict[str, Any] = {"columns": (0, SIZE[1]), "num_columns": SIZE[1]} | options
    return read_matrix(DictReader(tensors), MatrixSlice(parts=(part,), **given), formats_of(config or {}))


@pytest.mark.parametrize("case", CASES)
def test_numbers_as_the_library_reads_them(case: str) -> None:
    exact = golden(case)["float32"]
    form = read(tensors_of(case))
    assert torch.equal(form.dequantize(torch.float32), exact)
    order = HeadOrder(16, 16)
    ordered = read(tensors_of(case), (16, 32), (0, 16), order=order).dequantize(torch.float32)
    assert torch.equal(ordered, order.apply(exact[[*range(16, 32), *range(16)]]))
    part = read(tensors_of(case), (5, 30), columns=(48, 96)).dequantize(torch.float32)
    assert torch.equal(part, exact[5:30, 48:])


def test_forms() -> None:
    """4 bits stay 4 bits, though the file has a byte for each number."""
    for case, packed in (("int8", False), ("int4", True), ("int4-zeros", False)):
        form = read(tensors_of(case))
        assert isinstance(form, Codes) and (form.is_packed or not packed)
    assert read(tensors_of("int4")).nbytes < 0.7 * read(tensors_of("int8-groups")).nbytes
    plain, dynamic = read(tensors_of("fp8")), read(tensors_of("fp8"), config=DYNAMIC)
    assert isinstance(plain, Fp8) and isinstance(dynamic, Fp8)
    assert (plain.float8_inputs, dynamic.float8_inputs) == (False, True)


@pytest.mark.parametrize(
    ("case", "name", "tensor", "message"),
    [
        ("int8", "_weight_scale", None, "weight m._weight_scale does not exist"),
        (
            "int8",
            "_weight_act_pre_scale",
            torch.ones(1),
            "weight m._weight_act_pre_scale scales the inputs of a matrix; that is not served",
        ),
        (
            "int8",
            "_weight_scale",
            torch.ones(7, 1),
            "weight m._weight_scale has shape [7, 1]; 8 bits in groups of 96 of a matrix [32, 96] ask for [32, 1]",
        ),
        (
            "int8",
            "_weight_zero_point",
            torch.zeros(32, 1),
            "weight m._weight_zero_point holds 32 numbers of type F32; 32 scales ask for as many whole numbers",
        ),
        (
            "int8",
            "_weight_zero_point",
            torch.full((32, 1), 200),
            "weight m._weight_zero_point holds zero points of more than 8 bits",
        ),
        (
            "int8",
            "_weight_qdata",
            torch.zeros(32, 96, dtype=torch.uint8),
            "weight m._weight_qdata is stored as U8; of torchao, I8 and F8_E4M3 are served",
        ),
        (
            "int8",
            "_weight_qdata",
            torch.zeros(32, 48, dtype=torch.int8),
            "weight m._weight_qdata has shape [32, 48]; the config asks for 96 at dimension 1",
        ),
    ],
)
def test_damaged_files(case: str, name: str, tensor: Tensor | None, message: str) -> None:
    tensors = tensors_of(case) | ({} if tensor is None else {f"m.{name}": tensor})
    if tensor is None:
        del tensors[f"m.{name}"]
    with pytest.raises(StartupError) as refusal:
        read(tensors)
    assert str(refusal.value) == message
