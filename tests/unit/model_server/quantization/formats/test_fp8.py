"""8-bit floats as files store them, decoded as the libraries that write them do."""

from __future__ import annotations

import pytest
import torch
from support.dict_reader import DictReader
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats.fp8 import Fp8Format
from model_server.weights.matrix import HeadOrder, MatrixSlice, Part

E4M3 = torch.float8_e4m3fn


def stored(num_rows: int, num_columns: int, scale_shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_rows, num_columns, generator=generator).to(E4M3)
    return weight, torch.rand(scale_shape, generator=generator) + 0.1


def read(tensors: dict[str, Tensor], *parts: Part, dtype: torch.dtype = torch.float32, **options: object) -> Tensor:
    wanted = MatrixSlice(parts=parts, **options)  # type: ignore[arg-type]
    return Fp8Format({}).read(DictReader(tensors), wanted).dequantize(dtype)


def whole(tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    num_rows, num_columns = tensors["m.weight"].shape
    part = Part("m", ((0, num_rows),), num_rows)
    return read(tensors, part, columns=(0, num_columns), num_columns=num_columns, dtype=dtype)


def test_bytes_of_a_file() -> None:
    """0x38 is 1, 0xb8 -1, 0x7e 448, 0x01 2**-9; E8M0's byte 128 is 2."""
    weight = torch.tensor([[0x38, 0xB8], [0x7E, 0x01]], dtype=torch.uint8).view(E4M3)
    wanted = torch.tensor([[1, -1], [448, 2**-9]])
    scale = torch.tensor([[128]], dtype=torch.uint8)
    assert torch.equal(whole({"m.weight": weight, "m.weight_scale": torch.tensor(0.5)}), wanted / 2)
    assert torch.equal(whole({"m.weight": weight, "m.weight_scale_inv": scale}), wanted * 2)
    assert torch.equal(whole({"m.weight": weight, "m.weight_scale_inv": scale.view(torch.float8_e8m0fnu)}), wanted * 2)


def test_scales_of_gptqmodel_divide() -> None:
    """As it packs two rows: 448 stands for the largest number of each, and the scale is what it was multiplied by."""
    weight = torch.tensor([[0x7E, 0x76], [0x7E, 0xF6]], dtype=torch.uint8).view(E4M3)
    tensors = {"m.weight": weight, "m.weight_scale_inv": torch.tensor([448.0, 224.0])}
    wanted = MatrixSlice(parts=(Part("m", ((0, 2),), 2),), columns=(0, 2), num_columns=2)
    found = Fp8Format({"weight_scale_semantics": "inverse"}).read(DictReader(tensors), wanted)
    assert torch.allclose(found.dequantize(torch.float32), torch.tensor([[1.0, 0.5], [2.0, -1.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("scale_shape", [(2, 3), (1, 1), (256, 3)])
def test_blocks_as_transformers_decodes_them(
    scale_shape: tuple[int, int], scale_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight, scales = stored(256, 384, scale_shape)
    scales = (scales * 10 + 120).to(torch.uint8) if scale_dtype == torch.uint8 else scales.to(scale_dtype)
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scales, dtype)
    assert torch.equal(whole({"m.weight": weight, "m.weight_scale_inv": scales}, dtype), wanted)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (200,), (200, 1), (2, 3), (200, 3)])
def test_one_scale_or_one_for_each_row_or_block(name: str, shape: tuple[int, ...]) -> None:
    """300 columns and 200 rows: the blocks at the edges are short."""
    weight, scales = stored(200, 300, shape)
    spread = scales.view(-1, 1) if scales.dim() < 2 else scales
    wide = spread.repeat_interleave(128, 1)[:, :300] if spread.shape[1] == 3 and shape != (200, 3) else spread
    if shape == (200, 3):
        wide = spread.repeat_interleave(100, 1)
    tall = wide.repeat_interleave(128, 0)[:200] if len(wide) == 2 else wide
    assert torch.equal(whole({"m.weight": weight, f"m.{name}": scales}), weight.float() * tall)


@pytest.mark.parametrize("shape", [(), (384, 1), (3, 2)])
@pytest.mark.parametrize("order", [None, HeadOrder(64, 32), HeadOrder(64, 64)])
def test_rows_and_columns_of_several_matrices(shape: tuple[int, ...], order: HeadOrder | None) -> None:
    first, second = stored(384, 256, shape), stored(384, 256, shape, seed=1)
    tensors = {"m.weight": first[0], "m.weight_scale": first[1], "n.weight": second[0], "n.weight_scale": second[1]}
    full = [whole({"m.weight": weight, "m.weight_scale": scale}) for weight, scale in (first, second)]
    parts = Part("m", ((64, 128), (192, 256)), 384, order), Part("n", ((0, 192),), None)
    rows = torch.cat([full[0][64:128], full[0][192:256]])
    wanted = torch.cat([rows if order is None else order.apply(rows), full[1][:192]])
    assert torch.equal(read(tensors, *parts, columns=(0, 256), num_columns=256), wanted)
    assert torch.equal(read(tensors, *parts, columns=(64, 128)), wanted[:, 64:128])
    assert torch.equal(read(tensors, *parts, columns=(96, 224)), wanted[:, 96:224])


def test_what_is_claimed() -> None:
    weight, scale = stored(4, 4, ())
    reader = DictReader({"m.weight": weight, "m.weight_scale": scale, "n.weight": scale, "o.weight": weight.int()})
    assert [Fp8Format({}).claims(reader, name) for name in ("m", "n", "o", "p")] == [True, False, False, False]


def test_what_does_not_fit() -> None:
    weight, scale = stored(256, 256, (3, 2))
    with pytest.raises(
        StartupError, match=r"^weight m\.weight_scale does not exist, but the numbers that it scales do$"
    ):
        whole({"m.weight": weight})
    message = (
        r"^weight m\.weight_scale has shape \[3, 2\]; blocks of \[128, 128\] of a matrix \[256, 256\] ask for \[2, 2\]$"
    )
    with pytest.raises(StartupError, match=message):
        whole({"m.weight": weight, "m.weight_scale": scale})
    tensors = {"m.weight": weight, "m.weight_scale": scale[:2]}
    with pytest.raises(StartupError, match=r"shape \[256, 256\]; the config asks for 300 at dimension 0$"):
        read(tensors, Part("m", ((0, 4),), 300), columns=(0, 256))
    weight, scale = stored(256, 264, (2, 3))
    with pytest.raises(
        StartupError, match=r"3 shards cut groups of 128 into pieces of 8; at least 16 are needed: use --num-shard 1$"
    ):
        read({"m.weight": weight, "m.weight_scale": scale}, Part("m", ((0, 256),), 256), columns=(88, 176))


@pytest.mark.parametrize("scale", [torch.tensor(torch.nan), torch.tensor([[255]], dtype=torch.uint8)])
def test_scales_that_are_not_numbers(scale: Tensor) -> None:
    weight, _ = stored(32, 16, (1,))
    with pytest.raises(StartupError, match=r"^weight m\.weight_scale holds scales that are infinite or not numbers"):
        whole({"m.weight": weight, "m.weight_scale": scale})


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, False),
        ({"activation_scheme": "dynamic"}, True),
        ({"activation_scheme": None}, False),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {}, "input_activations": None}}}, False),
        ({"config_groups": {"a": {"targets": ["m"], "input_activations": {"num_bits": 8, "type": "int"}}}}, False),
        ({"config_groups": {"a": {"targets": ["m"], "input_activations": {"num_bits": 8, "type": "float"}}}}, True),
        ({"config_groups": {"a": {"targets": ["n"], "input_activations": {"num_bits": 8, "type": "float"}}}}, False),
    ],
)
def test_whether_it_was_made_for_activations_of_8_bits(config: dict[str, object], wanted: bool) -> None:
    weight, scales = stored(32, 16, (1,))
    part = Part("m", ((0, 32),), 32)
    tensors = {"m.weight": weight, "m.weight_scale": scales}
    read = Fp8Format(config).read(DictReader(tensors), MatrixSlice(parts=(part,), columns=(0, 16), num_columns=16))
    assert read.float8_inputs == wanted
    assert read.rows(0, 8).permuted(torch.arange(8)).float8_inputs == wanted
