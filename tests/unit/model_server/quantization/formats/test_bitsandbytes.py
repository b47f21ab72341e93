"""Files of bitsandbytes are read to the bit as the library reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.bitsandbytes_files import eight_bits, four_bits
from support.bitsandbytes_golden import golden
from support.dict_reader import DictReader
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats import formats_of, read_matrix
from model_server.quantization.forms import Form, Stacked
from model_server.quantization.forms.codes import Codes
from model_server.quantization.forms.table import TableCodes
from model_server.weights.matrix import HeadOrder, MatrixSlice, Part
from model_server.weights.reader import Range

SHAPES = {"blocks": (8, 128), "crossing": (20, 48), "short": (5, 70), "large": (130, 128)}
FOUR_BITS = [
    *(f"{kind}-{shape}" for kind in ("nf4", "fp4", "double") for shape in ("blocks", "crossing", "short")),
    "bfloat16-blocks", "bfloat16-crossing", "wide-blocks", "double-large",
]  # fmt: skip
STATE = "m.weight.quant_state.bitsandbytes__nf4"


def tensors_of(case: str) -> dict[str, Tensor]:
    decoded = ("source", "float32", "bfloat16")
    return {f"m.{name}": tensor for name, tensor in golden(case).items() if name not in decoded}


def read(tensors: dict[str, Tensor], size: tuple[int, int], *rows: Range, **options: Any) -> Form:
    part = Part("m", rows or ((0, size[0]),), size[0], options.pop("order", None))
    given: dict[str, Any] = {"columns": (0, size[1]), "num_columns": size[1]} | options
    return read_matrix(DictReader(tensors), MatrixSlice(parts=(part,), **given), formats_of({}))


@pytest.mark.parametrize("case", FOUR_BITS)
def test_numbers_of_4_bits_as_the_library_reads_them(case: str) -> None:
    vectors, size = golden(case), SHAPES[case.split("-")[1]]
    form = read(tensors_of(case), size)
    assert isinstance(form, TableCodes)
    assert torch.equal(form.dequantize(torch.bfloat16), vectors["bfloat16"])
    exact = vectors.get("float32")
    if exact is not None:
        assert torch.equal(form.dequantize(torch.float32), exact)


@pytest.mark.parametrize("shape", ["blocks", "crossing", "short"])
def test_numbers_of_8_bits_as_the_library_reads_them(shape: str) -> None:
    vectors = golden(f"int8-{shape}")
    form = read(tensors_of(f"int8-{shape}"), SHAPES[shape])
    assert isinstance(form, Codes)
    # The library multiplies in another order.
    torch.testing.assert_close(form.dequantize(torch.float32), vectors["float32"], rtol=3e-7, atol=0)


@pytest.mark.parametrize("case", ["nf4-crossing", "double-crossing", "bfloat16-crossing", "int8-crossing"])
def test_some_rows_and_columns(case: str) -> None:
    tensors, size = tensors_of(case), SHAPES["crossing"]
    exact = read(tensors, size).dequantize(torch.float32)
    part = read(tensors, size, (5, 18), columns=(16, 48)).dequantize(torch.float32)
    assert torch.equal(part, exact[5:18, 16:48])
    order = HeadOrder(10, 10)
    ordered = read(tensors, size, (10, 20), (0, 10), order=order).dequantize(torch.float32)
    assert torch.equal(ordered, order.apply(exact[[*range(10, 20), *range(10)]]))


def test_files_as_the_tests_write_them() -> None:
    """What other tests use in place of the library."""
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))
    for store, _ in (four_bits(), four_bits("fp4", double=True, storage=torch.bfloat16), eight_bits()):
        made = store("m", weight)
        assert made is not None
        form = read({f"m.{name}": tensor for name, tensor in made[0].items()}, (24, 96))
        assert torch.equal(form.dequantize(torch.float32), made[1])


def test_kinds_that_are_read_as_one_matrix() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    tensors, exact = {}, []
    for name, (store, _) in zip("qkv", (four_bits(), four_bits(double=True), eight_bits()), strict=True):
        made = store(name, weight)
        assert made is not None
        tensors |= {f"{name}.{end}": tensor for end, tensor in made[0].items()}
        exact.append(made[1])
    parts = tuple(Part(name, ((0, 32),), 32) for name in "qkv")
    form = read_matrix(DictReader(tensors), MatrixSlice(parts=parts, columns=(0, 64)), formats_of({}))
    assert isinstance(form, Stacked) and [type(one) for one in form.forms] == [TableCodes, Codes]
    assert torch.equal(form.dequantize(torch.float32), torch.cat(exact))


def changed_state(**fields: Any) -> dict[str, Tensor]:
    tensors = tensors_of("double-blocks")
    said = json.loads(bytes(tensors[STATE].tolist())) | fields
    return tensors | {STATE: torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)}


def changed(case: str, name: str, tensor: Tensor | None) -> dict[str, Tensor]:
    tensors = tensors_of(case)
    if tensor is None:
        del tensors[name]
        return tensors
    return tensors | {name: tensor}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (changed_state(shape=[8, 64]), f"weight {STATE} says [8, 64]; the config asks for [8, 128]"),
        (changed_state(shape=[8]), f"weight {STATE} cannot be read: not enough values to unpack (expected 2, got 1)"),
        (changed_state(blocksize=0), f"weight {STATE} cannot be read: a size is not a positive number"),
        (changed_state(nested_blocksize=True), f"weight {STATE} cannot be read: a size is not a positive number"),
        (
            changed_state(blocksize=32),
            "weight m.weight.absmax has shape [16]; 4 bits in groups of 32 of a matrix [8, 128] ask for [32]",
        ),
        (
            changed("double-blocks", "m.weight", torch.zeros(500, 1, dtype=torch.uint8)),
            "weight m.weight has shape [500, 1]; 4 bits in groups of 64 of a matrix [8, 128] ask for [512, 1]",
        ),
        (changed("nf4-blocks", "m.weight.absmax", None), "weight m.weight.absmax does not exist"),
        (changed("double-blocks", "m.weight.nested_absmax", None), "weight m.weight.nested_absmax does not exist"),
        (
            changed("double-blocks", "m.weight.absmax", torch.ones(16)),
            "weight m.weight.absmax is stored as F32; scales that are quantized are bytes",
        ),
        (
            changed("nf4-blocks", "m.weight.quant_map", torch.ones(8)),
            "weight m.weight.quant_map has shape [8]; 4 bits ask for [16]",
        ),
        (
            changed("int8-blocks", "m.SCB", torch.ones(7)),
            "weight m.SCB has shape [7]; 8 bits in groups of 128 of a matrix [8, 128] ask for [8]",
        ),
        (
            changed("int8-blocks", "m.weight_format", torch.tensor(1, dtype=torch.uint8)),
            "weight m.weight is stored in an order of GPUs; save it with a newer bitsandbytes",
        ),
        (
            changed("int8-blocks", "m.weight_format", torch.ones(2, dtype=torch.uint8)),
            "weight m.weight is stored in an order of GPUs; save it with a newer bitsandbytes",
        ),
        (
            changed("double-blocks", "m.weight.nested_quant_map", torch.ones(16)),
            "weight m.weight.nested_quant_map has shape [16]; bytes ask for [256]",
        ),
        (
            changed("nf4-blocks", "m.weight.absmax", torch.full((16,), torch.nan)),
            "weight m.weight.absmax holds scales that are infinite or not numbers: its file is damaged",
        ),
        (
            changed("double-blocks", "m.weight.nested_absmax", torch.full((1,), torch.inf)),
            "weight m.weight.nested_absmax holds scales that are infinite or not numbers: its file is damaged",
        ),
        (
            changed("int8-blocks", "m.weight", torch.ones(8, 128)),
            "weight m.weight is stored as F32; beside SCB it must be I8",
        ),
    ],
)
def test_damaged_files(tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(StartupError) as refusal:
        read(tensors, (8, 128))
    assert str(refusal.value) == message


def test_shards_that_would_cut_blocks_too_small() -> None:
    with pytest.raises(StartupError, match="cut groups of 64 into pieces of 8; at least 16"):
        read(tensors_of("nf4-blocks"), (8, 128), columns=(40, 80))
