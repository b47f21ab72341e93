"""Whole numbers as compressed-tensors stores them, against what the library makes of the same files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from support.dict_reader import DictReader
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats.compressed import CompressedFormat
from model_server.weights.matrix import HeadOrder, MatrixSlice, Part

NUM_ROWS, NUM_COLUMNS = 72, 192
Config = dict[str, Any]


def compress(format_name: str, **said: Any) -> tuple[dict[str, Tensor], Tensor, Config]:
    """A random matrix as the library stores it, what the library reads from that, and its config."""
    args = QuantizationArgs(**said)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(NUM_ROWS, NUM_COLUMNS, generator=torch.Generator().manual_seed(3))
    group = said.get("group_size") or NUM_COLUMNS
    pieces = weight if args.strategy == "tensor" else weight.view(NUM_ROWS, -1, group)
    least, most = (pieces.amin(), pieces.amax()) if args.strategy == "tensor" else (pieces.amin(2), pieces.amax(2))
    scale, zero_point = calculate_qparams(least, most, args)
    compressor = BaseCompressor.get_value_from_registry(format_name)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    stored = compressor.compress(state, scheme)
    wanted = compressor.decompress(stored, scheme)["weight"]
    config = {"config_groups": {"group_0": scheme.model_dump(mode="json")}}
    return {f"m.{name}": tensor for name, tensor in stored.items()}, wanted, config


def read(
    tensors: dict[str, Tensor],
    config: Config,
    *rows: tuple[int, int],
    columns: tuple[int, int] = (0, NUM_COLUMNS),
    order: HeadOrder | None = None,
) -> Tensor:
    part = Part("m", rows or ((0, NUM_ROWS),), NUM_ROWS, order)
    wanted = MatrixSlice(parts=(part,), columns=columns, num_columns=NUM_COLUMNS)
    return CompressedFormat(config).read(DictReader(tensors), wanted).dequantize(torch.float32)


CASES = [
    ("pack-quantized", {"num_bits": bits, "symmetric": symmetric, "strategy": strategy, "group_size": group})
    for bits in (2, 3, 4, 5, 6, 8)
    for symmetric in (True, False)
    for strategy, group in (("group", 32), ("group", 64), ("channel", None))
] + [
    (name, {"num_bits": bits, "symmetric": symmetric, "strategy": strategy})
    for name in ("int-quantized", "naive-quantized")
    for bits in (8, 4)
    for symmetric in (True, False)
    for strategy in ("tensor", "channel")
]


@pytest.mark.parametrize(("name", "said"), CASES)
def test_numbers_as_the_library_reads_them(name: str, said: dict[str, Any]) -> None:
    tensors, wanted, config = compress(name, **said)
    assert torch.equal(read(tensors, config), wanted)
    assert torch.equal(read(tensors, {}), wanted), "without a config"
    order = HeadOrder(24, 24)
    assert torch.equal(
        read(tensors, config, (24, 48), (0, 24), order=order), order.apply(wanted[[*range(24, 48), *range(24)]])
    )
    assert torch.equal(read(tensors, config, (5, 50), columns=(48, 96)), wanted[5:50, 48:96])


def test_the_words_of_packed_numbers() -> None:
    """Zero points are packed along the outputs."""

    def values(word: int, columns: int, zero_points: int | None = None) -> list[list[float]]:
        words = {"m.weight_packed": torch.tensor([word] * 8).int().view(8, 1), "m.weight_scale": torch.ones(8, 1)}
        if zero_points is not None:
            words["m.weight_zero_point"] = torch.tensor([[zero_points]]).int()
        words["m.weight_shape"] = torch.tensor([8, columns])
        wanted = MatrixSlice(parts=(Part("m", ((0, 8),), 8),), columns=(0, columns), num_columns=columns)
        said = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 32 // columns}}}}
        form = CompressedFormat(said).read(DictReader(words), wanted)
        found: list[list[float]] = form.dequantize(torch.float32).tolist()
        return found

    numbers, zeros = [-8, -7, -1, 0, 1, 2, 6, 7], [-8, 7, 0, 1, 2, 3, 4, 5]
    assert values(0xFEA98710, 8) == [numbers] * 8
    assert values(0xFEA98710, 8, 0xDCBA98F0) == [[number - zero for number in numbers] for zero in zeros]
    assert values(0xFF807F00, 4) == [[-128, -1, 0, 127]] * 8


def test_groups_that_do_not_divide_the_columns() -> None:
    codes = torch.randint(-8, 8, (NUM_ROWS, NUM_COLUMNS), dtype=torch.int8)
    scales = torch.rand(NUM_ROWS, 2)
    tensors = {"m.weight": codes, "m.weight_scale": scales}
    wanted = codes * scales.repeat_interleave(128, 1)[:, :NUM_COLUMNS]
    config = {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 8, "group_size": 128}}}}
    assert torch.equal(read(tensors, config), wanted)
    assert torch.equal(read(tensors, config, columns=(96, 192)), wanted[:, 96:])


def test_older_files_keep_codes_within_words() -> None:
    codes = torch.randint(0, 8, (NUM_ROWS, NUM_COLUMNS))
    padded = torch.nn.functional.pad(codes, (0, 8)).view(NUM_ROWS, -1, 10)
    words = (padded << torch.arange(10) * 3).sum(2).to(torch.int32)
    tensors = {
        "m.weight_packed": words, "m.weight_scale": torch.ones(NUM_ROWS, 1),
        "m.weight_shape": torch.tensor([NUM_ROWS, NUM_COLUMNS]),
    }  # fmt: skip
    config = {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 3}}}}
    assert torch.equal(read(tensors, config), codes - 4.0)
    assert torch.equal(read(tensors, config, (7, 9), columns=(32, 96)), codes[7:9, 32:96] - 4.0)


def test_what_does_not_fit() -> None:
    tensors, _, _ = compress("pack-quantized", num_bits=4, strategy="group", group_size=32)
    with pytest.raises(
        StartupError, match=r"^weight m\.weight_packed has 24 words a row; 192 columns of 8 bits ask for 48"
    ):
        read(tensors, {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 8}}}})
    tensors["m.weight_shape"] = torch.tensor([NUM_ROWS, 200])
    with pytest.raises(StartupError, match=r"^weight m\.weight_shape is \[72, 200\]; the config asks for \[72, 192\]$"):
        read(tensors, {})


@pytest.mark.parametrize("missing", ["weight_scale", "weight_shape"])
def test_what_is_missing(missing: str) -> None:
    tensors, _, config = compress("pack-quantized", num_bits=4, strategy="group", group_size=32)
    del tensors[f"m.{missing}"]
    with pytest.raises(StartupError, match=rf"^weight m\.{missing} does not exist"):
        read(tensors, config)


@pytest.mark.parametrize("columns", [(0, NUM_COLUMNS), (48, 96), (96, 192)])
def test_columns_that_are_grouped_in_another_order(columns: tuple[int, int]) -> None:
    tensors, _, config = compress("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False)
    index = torch.randperm(NUM_COLUMNS, generator=torch.Generator().manual_seed(5)) // 32
    codes = read(tensors | {"m.weight_scale": torch.ones(NUM_ROWS, 6)}, config)
    in_place = torch.arange(NUM_COLUMNS) // 32
    zeros = codes - read(
        {name: tensor for name, tensor in tensors.items() if "zero" not in name}
        | {"m.weight_scale": torch.ones(NUM_ROWS, 6)},
        config,
    )
    spread = zeros[:, ::32]
    wanted = (codes - spread[:, in_place] + spread[:, index]) * tensors["m.weight_scale"][:, index]
    found = read(tensors | {"m.weight_g_idx": index.int()}, config, columns=columns)
    assert torch.equal(found, wanted[:, slice(*columns)])
    unset = tensors | {"m.weight_g_idx": torch.full_like(index, -1).int()}
    assert torch.equal(read(unset, config), read(tensors, config))


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_older_files_are_bytes(bits: int) -> None:
    """The library packs them along the outputs; it used to leave them as they were."""
    tensors, wanted, config = compress(
        "pack-quantized", num_bits=bits, strategy="group", group_size=32, symmetric=False
    )
    words, per_word = tensors["m.weight_zero_point"], 32 // bits
    fields = (words.unsqueeze(1) >> (torch.arange(per_word) * bits).view(1, -1, 1)) & (2**bits - 1)
    older = fields.flatten(0, 1)[:NUM_ROWS] - 2 ** (bits - 1)
    found = read(tensors | {"m.weight_zero_point": older.to(torch.int8)}, config)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("weight_packed", lambda t: t.float(), "is stored as F32; codes are packed into words of I32"),
        ("weight_packed", lambda t: t[:70].clone(), "has shape \\[70, 24\\]; the config asks for 72 at dimension 0"),
        ("weight_packed", lambda t: t.flatten(), "has shape \\[1728\\]; the config asks for 72 at dimension 0"),
        ("weight_zero_point", lambda t: t[:, :3].clone(), "holds 216 numbers; 432 scales do"),
        ("weight_zero_point", lambda t: t.float(), "is stored as F32; codes are packed into words of I32"),
        ("weight_scale", lambda t: t.int(), "is stored as I32, not as floating point numbers"),
    ],
)
def test_files_that_lie_of_packed_numbers(name: str, change: Any, text: str) -> None:
    tensors, _, config = compress("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False)
    with pytest.raises(StartupError, match=rf"^weight m\.{name} {text}$"):
        read(tensors | {f"m.{name}": change(tensors[f"m.{name}"])}, config)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t[:100], r"has shape \[100\]; a matrix of 192 inputs asks for as many"),
        (lambda t: t + 1, "names groups"),
    ],
)
def test_an_order_that_lies(change: Any, text: str) -> None:
    tensors, _, config = compress("pack-quantized", num_bits=4, strategy="group", group_size=32)
    index = (torch.arange(NUM_COLUMNS) // 32).flip(0).int()
    with pytest.raises(StartupError, match=rf"^weight m\.weight_g_idx {text}"):
        read(tensors | {"m.weight_g_idx": change(index)}, config)
