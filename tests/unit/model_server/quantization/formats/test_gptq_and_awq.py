"""gptq and awq files to the byte, by a writer that counts bits; what shards keep of them; and what is refused."""

from __future__ import annotations

import pytest
import torch
from support.dict_reader import DictReader
from support.quantized import (
    Numbers,
    awq_tensors,
    gptq_tensors,
    rounded,
    shuffled_index,
    streams,
)
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats import formats_of, read_matrix
from model_server.quantization.forms import Form, Stacked
from model_server.quantization.forms.codes import Codes
from model_server.weights.matrix import HeadOrder, MatrixSlice, Part

WEIGHT = torch.randn(64, 192, generator=torch.Generator().manual_seed(1))


def read(tensors: dict[str, Tensor], config: dict[str, object] | None = None, *parts: Part, **options: object) -> Form:
    """All of `m` unless said otherwise."""
    columns = options.pop("columns", (0, 192))
    wanted = MatrixSlice(
        parts=parts or (Part("m", ((0, 64),), 64),), columns=columns, num_columns=192, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return read_matrix(DictReader(tensors), wanted, formats_of(config or {}))


def named(tensors: dict[str, Tensor], module: str = "m") -> dict[str, Tensor]:
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}


def words(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32)


def test_words_of_files() -> None:
    """Codes 0 to 7 as each format packs them."""
    codes = torch.arange(8).view(8, 1)
    assert torch.equal(streams(codes.t(), 4), words(0x76543210).view(1, 1))
    assert streams(codes.repeat(4, 1).t(), 3).tolist() == [words(0x88FAC688, 0xC688FAC6, 0xFAC688FA).tolist()]
    numbers = Numbers(codes, torch.full((8, 1), 8), torch.ones(8, 1).half(), torch.zeros(1, dtype=torch.int64), 4)
    assert awq_tensors(numbers)["qweight"].tolist() == [words(0x75316420).tolist()]


@pytest.mark.parametrize(
    ("stored", "config", "value"),
    [
        (0x77777777, {}, -2.5),
        (0x88888888, {"checkpoint_format": "gptq_v2"}, -2.5),
        (0x88888888, {"checkpoint_format": "gptq", "sym": True}, -2.5),  # of version 2, whatever it says
        (0x88888888, {"sym": False}, -3.0),
        (0x88888888, {"sym": False, "format": "gptq_v2"}, -2.5),
        (0x88888888, {"sym": False, "quant_method": "auto-round", "packing_format": "auto_round"}, -2.5),
        (0x88888888, {"sym": False, "quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"}, -2.5),
        (0x88888888, {"sym": False, "quant_method": "intel/auto-round", "backend": "auto_round:exllamav2"}, -2.5),
        (0x88888888, {"sym": False, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, -3.0),
    ],
)
def test_zero_points_of_two_versions(stored: int, config: dict[str, object], value: float) -> None:
    tensors = {"qweight": words(*[0x33333333] * 8).view(1, 8), "qzeros": words(stored).view(1, 1)}
    reader = DictReader(named({**tensors, "scales": torch.full((1, 8), 0.5).half()}))
    wanted = MatrixSlice(parts=(Part("m", ((0, 8),), 8),), columns=(0, 8), num_columns=8)
    form = read_matrix(reader, wanted, formats_of(config))
    assert torch.equal(form.dequantize(torch.float32), torch.full((8, 8), value))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_zero_point_of_0_borrows_from_the_word(bits: int) -> None:
    """Writers of the first version subtract one from each code of a word by one subtraction."""
    count = 32 // bits
    zeros = [index % 3 for index in range(count)]
    word = sum((zero << (bits * index)) - (1 << (bits * index)) for index, zero in enumerate(zeros)) % 2**32
    tensors = {
        "qweight": words(*[0] * count * bits).view(bits, count),
        "qzeros": words(word).view(1, 1),
        "scales": torch.ones(1, count).half(),
    }
    wanted = MatrixSlice(parts=(Part("m", ((0, count),), count),), columns=(0, 32), num_columns=32)
    form = read_matrix(DictReader(named(tensors)), wanted, formats_of({"bits": bits, "sym": False}))
    assert form.dequantize(torch.float32)[:, 0].tolist() == [-float(zero) for zero in zeros]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_to_the_bit(bits: int, group: int, act_order: bool, symmetric: bool) -> None:
    index = shuffled_index(192, group) if act_order and group > 0 else None
    numbers = rounded(WEIGHT, bits, group, symmetric=symmetric, index=index)
    exact = numbers.exact()
    for version in (1, 2):
        config = {"checkpoint_format": "gptq_v2" if version == 2 else "gptq", "sym": symmetric, "group_size": group}
        tensors = named(gptq_tensors(numbers, version=version))
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(read(tensors, config).dequantize(dtype), exact.to(dtype))
        for columns in ((0, 96), (96, 192)):
            assert torch.equal(
                read(tensors, config, columns=columns).dequantize(torch.float32), exact[:, slice(*columns)]
            )


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_awq_to_the_bit(group: int) -> None:
    numbers = rounded(WEIGHT, 4, group)
    tensors = named(awq_tensors(numbers))
    part = Part("m", ((3, 9), (20, 61)), 64)
    kept = [*range(3, 9), *range(20, 61)]
    for columns in ((0, 192), (96, 192)):
        found = read(tensors, {"group_size": group}, part, columns=columns).dequantize(torch.float32)
        assert torch.equal(found, numbers.exact()[kept, slice(*columns)])
    del tensors["m.qzeros"]
    middle = Numbers(numbers.codes, torch.full_like(numbers.zeros, 8), numbers.scales, numbers.index, 4)
    assert torch.equal(read(tensors, {"group_size": group}).dequantize(torch.float32), middle.exact())


def test_the_tensors_decide_not_the_config() -> None:
    """Neither the bits, nor the groups, nor the order of the config are those of the file."""
    index = shuffled_index(192, 64)
    numbers = rounded(WEIGHT, 4, 64, index=index)
    config = {"bits": 8, "group_size": 128, "desc_act": False, "sym": False}
    assert torch.equal(read(named(gptq_tensors(numbers)), config).dequantize(torch.float32), numbers.exact())
    plain = rounded(WEIGHT, 4, 64)
    form = read(named(gptq_tensors(plain)), config | {"desc_act": True})
    assert isinstance(form, Codes)
    assert form.order is None
    assert form.nbytes == 64 * 96 + 64 * 3 * 3


def test_heads_change_places_with_their_scales() -> None:
    numbers = rounded(WEIGHT, 4, 32)
    order = HeadOrder(16, 16)
    found = read(named(gptq_tensors(numbers)), {"sym": False}, Part("m", ((16, 48),), 64, order))
    assert torch.equal(found.dequantize(torch.float32), order.apply(numbers.exact()[16:48]))


def test_parts_of_one_kind_are_fused() -> None:
    """Groups are cut to those that all have in common."""
    one, two = rounded(WEIGHT, 4, 64), rounded(-WEIGHT, 4, 96)
    tensors = named(gptq_tensors(one), "a") | named(gptq_tensors(two), "b")
    parts = Part("a", ((0, 64),), 64), Part("b", ((0, 32),), 64)
    form = read(tensors, {"sym": False}, *parts)
    assert isinstance(form, Codes)
    assert form.group == 32
    assert torch.equal(form.dequantize(torch.float32), torch.cat([one.exact(), two.exact()[:32]]))


@pytest.mark.parametrize("kind", ["bits", "order", "plain"])
def test_parts_of_other_kinds_stay_beside_each_other(kind: str) -> None:
    one = rounded(WEIGHT, 4, 64)
    two = rounded(-WEIGHT, 8 if kind == "bits" else 4, 64, index=shuffled_index(192, 64) if kind == "order" else None)
    tensors = named(gptq_tensors(one), "a")
    tensors |= {"b.weight": two.exact()} if kind == "plain" else named(gptq_tensors(two), "b")
    form = read(tensors, {"sym": False}, Part("a", ((0, 64),), 64), Part("b", ((0, 64),), 64))
    assert isinstance(form, Stacked)
    whole = torch.cat([one.exact(), two.exact()])
    assert torch.equal(form.dequantize(torch.float32), whole)
    assert torch.equal(form.rows(60, 70).dequantize(torch.float32), whole[60:70])
    rows = torch.tensor([70, 3, 4, 100])
    assert torch.equal(form.permuted(rows).dequantize(torch.float32), whole[rows])
    assert form.shape == (128, 192)


def test_groups_are_not_cut_too_small() -> None:
    tensors = named(gptq_tensors(rounded(WEIGHT, 4, 64)))
    text = r"^weight m\.qweight: 8 shards cut groups of 64 into pieces of 8; at least 16 are needed: use --num-shard 4$"
    with pytest.raises(StartupError, match=text):
        read(tensors, {}, columns=(24, 48))


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("scales", lambda t: None, r"^weight m\.scales does not exist$"),
        ("qzeros", lambda t: None, r"^weight m\.qzeros does not exist$"),
        (
            "qweight",
            lambda t: t[:16],
            r"^weight m\.qweight has shape \[16, 64\]; 4 bits in groups of 64 of a matrix \[64, 192\] ask for \[24",
        ),
        (
            "scales",
            lambda t: t[:, :32].contiguous(),
            r"^weight m\.scales has shape \[3, 32\]; 4 bits in groups of 64 of a matrix \[64, 192\] ask for \[3, 64\]$",
        ),
        ("scales", lambda t: t.flatten(), r"^weight m\.scales has shape \[192\]; it must have 2 dimensions$"),
        ("g_idx", lambda t: t.view(1, -1), r"^weight m\.g_idx has shape \[1, 192\]; it must have 1 dimension$"),
        ("g_idx", lambda t: t - 1, r"^weight m\.g_idx names groups that do not exist: there are 3$"),
        ("qweight", lambda t: t.float(), r"^weight m\.qweight is stored as F32; codes are packed into words of I32$"),
        ("qzeros", lambda t: t.float(), r"^weight m\.qzeros is stored as F32; codes are packed into words of I32$"),
        ("scales", lambda t: t.int(), r"^weight m\.scales is stored as I32; scales are floating point numbers$"),
        (
            "scales",
            lambda t: t * torch.inf,
            r"^weight m\.scales holds scales that are infinite or not numbers: its file",
        ),
        ("qweight", lambda t: t[0, 0].clone(), r"^weight m\.qweight has shape \[\]; it must have 2 dimensions$"),
        ("g_idx", lambda t: t + 1, r"^weight m\.g_idx names groups that do not exist: there are 3$"),
    ],
)
def test_files_that_lie(name: str, change: object, text: str) -> None:
    tensors = named(gptq_tensors(rounded(WEIGHT, 4, 64)))
    changed = change(tensors.pop(f"m.{name}"))  # type: ignore[operator]
    if changed is not None:
        tensors[f"m.{name}"] = changed
    with pytest.raises(StartupError, match=text):
        read(tensors, {"group_size": 64})


def test_scales_of_awq_that_are_not_numbers() -> None:
    tensors = named(awq_tensors(rounded(WEIGHT, 4, 64)))
    tensors["m.scales"][1, 3] = torch.nan
    with pytest.raises(StartupError, match=r"^weight m\.scales holds scales that are infinite or not numbers"):
        read(tensors, {"group_size": 64})


@pytest.mark.parametrize("bits", [0, 5, -4, "4", None])
def test_bits_that_a_config_makes_up(bits: object) -> None:
    tensors = named(gptq_tensors(rounded(WEIGHT, 4, 64)))
    honest = read(tensors, {"bits": 4})
    assert torch.equal(read(tensors, {"bits": bits}).dequantize(torch.float32), honest.dequantize(torch.float32))
    del tensors["m.g_idx"]
    tensors["m.qzeros"] = tensors["m.qzeros"][:, :3].contiguous()
    with pytest.raises(StartupError, match=r"m\.qzeros has shape"):
        read(tensors, {"bits": bits})


def test_awq_without_scales() -> None:
    tensors = named(awq_tensors(rounded(WEIGHT, 4, 64)))
    del tensors["m.scales"]
    with pytest.raises(StartupError, match=r"m\.scales does not exist"):
        read(tensors, {"quant_method": "awq"})


@pytest.mark.parametrize(("name", "dtype"), [("qweight", "words of I32"), ("scales", "floating point numbers")])
def test_awq_of_other_types(name: str, dtype: str) -> None:
    tensors = named(awq_tensors(rounded(WEIGHT, 4, 64)))
    tensors[f"m.{name}"] = tensors[f"m.{name}"].long()
    with pytest.raises(StartupError, match=rf"^weight m\.{name} is stored as I64; .*{dtype}$"):
        read(tensors, {"quant_method": "awq"})


def test_one_tensor_for_all_experts() -> None:
    """One matrix must not be served as that of each expert."""
    for tensors in (gptq_tensors(rounded(WEIGHT, 4, 64)), awq_tensors(rounded(WEIGHT, 4, 64))):
        wanted = MatrixSlice(parts=(Part("m", ((0, 64),), 64),), columns=(0, 192), expert=1)
        with pytest.raises(StartupError, match=r"^weight m holds all experts in one quantized tensor"):
            read_matrix(DictReader(named(tensors)), wanted, formats_of({}))
