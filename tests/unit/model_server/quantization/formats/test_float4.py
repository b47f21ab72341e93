"""4-bit floats of compressed-tensors to the bit as the library reads them, and of modelopt as its rule says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.dict_reader import DictReader
from support.quantized_folder import compressed, modelopt_nvfp4
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats import formats_of, read_matrix
from model_server.quantization.forms import Form
from model_server.quantization.forms.codes import Codes
from model_server.weights.matrix import HeadOrder, MatrixSlice, Part

ROWS, COLUMNS = 48, 192
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
SCHEMES: dict[str, Any] = {
    "nvfp4-pack-quantized": {**FLOAT4, "strategy": "tensor_group", "group_size": 16},
    "mxfp4-pack-quantized": {**FLOAT4, "strategy": "group", "group_size": 32, "scale_dtype": "uint8"},
    "mxfp8-quantized": {**FLOAT8, "strategy": "group", "group_size": 32, "scale_dtype": "uint8"},
}
Stored = tuple[dict[str, Tensor], Tensor]


def stored(name: str) -> Stored:
    """A random matrix as the library stores it, and as it is read."""
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(5))
    if name == "modelopt":
        store = modelopt_nvfp4()[0]
    else:
        store = compressed(name, {"targets": ["Linear"], "format": name, "weights": SCHEMES[name]})[0]
    made = store("m", weight)
    assert made is not None
    return {f"m.{end}": tensor for end, tensor in made[0].items()}, made[1].float()


def read(tensors: dict[str, Tensor], *rows: tuple[int, int], **options: Any) -> Form:
    part = Part("m", rows or ((0, ROWS),), ROWS, options.pop("order", None))
    given: dict[str, Any] = {"columns": (0, COLUMNS), "num_columns": COLUMNS} | options
    return read_matrix(DictReader(tensors), MatrixSlice(parts=(part,), **given), formats_of({}))


@pytest.mark.parametrize("name", [*SCHEMES, "modelopt"])
def test_numbers_as_the_library_reads_them(name: str) -> None:
    tensors, wanted = stored(name)
    form = read(tensors)
    assert name == "mxfp8-quantized" or (isinstance(form, Codes) and form.is_packed), "4 bits a number"
    found = form.dequantize(torch.float32)
    # The library itself computes in bfloat16, in which products with powers of 2 are exact.
    assert torch.equal(found, wanted)
    assert torch.equal(read(tensors).dequantize(torch.bfloat16), wanted.bfloat16())
    order = HeadOrder(24, 24)
    ordered = read(tensors, (24, 48), (0, 24), order=order).dequantize(torch.float32)
    assert torch.equal(ordered, order.apply(wanted[[*range(24, 48), *range(24)]]))
    part = read(tensors, (5, 40), columns=(48, 144))
    assert torch.equal(part.dequantize(torch.float32), wanted[5:40, 48:144])
    if name in ("nvfp4-pack-quantized", "modelopt"):
        assert isinstance(part, Codes) and part.factors is not None
        numbers = tensors["m.weight_scale"][5:40, 3:9].float()
        torch.testing.assert_close(part.factors[:, None] * numbers, part.scales, rtol=5e-7, atol=0)


def test_the_library_reads_the_same_numbers_in_bfloat16() -> None:
    """Its own way back, whose scales are of bfloat16 divided by a float32."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    tensors, _ = stored("nvfp4-pack-quantized")
    scheme = QuantizationScheme(targets=["Linear"], weights=SCHEMES["nvfp4-pack-quantized"])
    library = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    wanted = library.decompress({name[2:]: tensor for name, tensor in tensors.items()}, scheme)["weight"]
    assert torch.equal(read(tensors).dequantize(torch.bfloat16), wanted)


def test_the_words_of_the_formats() -> None:
    """.5, 1 in one byte, 6 and -6 in another; a scale of 2 and one of the matrix of 4."""
    numbers = torch.zeros(1, 8, dtype=torch.uint8)
    numbers[0, :2] = torch.tensor([0x21, 0xF7])
    scale = torch.full((1, 1), 2.0).to(torch.float8_e4m3fn)
    options: dict[str, Any] = {"columns": (0, 16), "num_columns": 16}
    cases: list[tuple[dict[str, Tensor], float]] = [
        ({"m.weight_packed": numbers, "m.weight_scale": scale, "m.weight_global_scale": torch.tensor([4.0])}, 0.5),
        ({"m.weight": numbers, "m.weight_scale": scale, "m.weight_scale_2": torch.tensor(4.0)}, 8.0),
        ({"m.weight": numbers, "m.weight_scale": torch.full((1, 1), 126, dtype=torch.uint8)}, 0.5),
    ]
    for tensors, factor in cases:
        part = Part("m", ((0, 1),), 1)
        form = read_matrix(DictReader(tensors), MatrixSlice(parts=(part,), **options), formats_of({}))
        assert form.dequantize(torch.float32)[0, :4].tolist() == [factor * value for value in (0.5, 1, 6, -6)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"m.weight_global_scale": None}, "weight_global_scale does not exist, nor m.weight_scale_2; scales of 8 bits"),
        ({"m.weight_global_scale": torch.tensor([1.0, 2.0])}, "weight_global_scale must be one finite number"),
        ({"m.weight_global_scale": torch.tensor([float("nan")])}, "weight_global_scale must be one finite number"),
        ({"m.weight_global_scale": torch.zeros(1)}, "weight_global_scale must be one finite number, not 0$"),
        ({"m.weight_scale": torch.ones(ROWS, 12) * torch.nan}, "m.weight_scale holds scales that are infinite or not"),
        ({"m.weight_scale": torch.ones(ROWS, 7)}, r"weight_scale has shape \[48, 7\]; 4-bit floats of a matrix"),
        ({"m.weight_scale": torch.ones(ROWS, 12).int()}, "weight_scale is stored as I32; scales of 4-bit floats"),
        ({"m.weight_packed": torch.zeros(ROWS, 95, dtype=torch.uint8)}, r"has shape \[48, 95\]; the config asks for"),
        ({"m.pre_quant_scale": torch.ones(COLUMNS)}, "pre_quant_scale scales the inputs of 4-bit floats; that is not"),
    ],
)
def test_what_does_not_fit(change: dict[str, Tensor | None], text: str) -> None:
    tensors = {name: t for name, t in (stored("nvfp4-pack-quantized")[0] | change).items() if t is not None}
    with pytest.raises(StartupError, match=text):
        read(tensors)


def test_groups_that_shards_cut_too_small() -> None:
    tensors, _ = stored("nvfp4-pack-quantized")
    with pytest.raises(StartupError, match="8 shards cut groups of 16 into pieces of 8; at least 16 are needed"):
        read(tensors, columns=(24, 48))
