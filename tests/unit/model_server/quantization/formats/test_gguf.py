"""Blocks of GGUF files: values bit-equal to the gguf library's, cut and merged as layers ask, multiplied as decoded."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy
import pytest
import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.layers.linear.factory import LinearFactory
from model_server.quantization.formats import read_matrix
from model_server.quantization.forms import Stacked
from model_server.quantization.forms.codes import Codes
from model_server.quantization.forms.offset_codes import OffsetCodes
from model_server.quantization.gguf.decode import DECODERS
from model_server.weights.gguf.header import BLOCKS
from model_server.weights.gguf.names import read_named
from model_server.weights.matrix import HeadOrder, MatrixSlice, Part
from model_server.weights.reader import SafetensorsReader

QUANTIZED = tuple(DECODERS)
# Where the halves that scale a block are.
FACTORS = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "IQ1_M": (),
}  # fmt: skip


def random_rows(kind: str, num_rows: int, num_columns: int, seed: int = 0) -> numpy.ndarray:
    """[rows, bytes] uint8: any bytes are codes; only the factors must be finite."""
    generator = numpy.random.default_rng(seed)
    length, size = BLOCKS[kind]
    blocks = generator.integers(0, 256, (num_rows, num_columns // length, size), dtype=numpy.uint8)
    for at in FACTORS.get(kind, (0,)):
        factors = generator.normal(0, 0.02, blocks.shape[:2]).astype(numpy.float16)
        blocks[..., at : at + 2] = factors[..., None].view(numpy.uint8)
    if kind == "MXFP4":  # an exponent, of any bytes
        blocks[..., 0] = generator.integers(115, 125, blocks.shape[:2])
    if kind == "IQ1_M":  # the half is in the upper four bits of words
        bits = numpy.abs(generator.normal(0, 0.02, blocks.shape[:2])).astype(numpy.float16).view(numpy.uint16)
        for word in range(4):
            upper = (bits >> 4 * word & 15).astype(numpy.uint8) << 4
            blocks[..., 49 + 2 * word] = blocks[..., 49 + 2 * word] & 15 | upper
    return blocks.reshape(num_rows, -1)


def write(path: Path, tensors: dict[str, tuple[str, numpy.ndarray]], heads: int = 2, kind: str = "qwen2") -> Path:
    writer = gguf.GGUFWriter(path, kind)
    writer.add_head_count(heads)
    for name, (dtype, values) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def library(kind: str, rows: numpy.ndarray) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]).copy())


def opened(path: Path, dtype: torch.dtype = torch.float32) -> SafetensorsReader:
    return SafetensorsReader({path: read_named(path)}, dtype=dtype, device=torch.device("cpu"))


def part(name: str, *rows: tuple[int, int], order: HeadOrder | None = None) -> Part:
    return Part(f"model.layers.0.{name}", rows, None, order)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_the_library_s(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    rows = random_rows(kind, 6, 768)
    path = write(tmp_path / "a.gguf", {"blk.0.ffn_down.weight": (kind, rows)})
    with opened(path) as reader:
        form = read_matrix(reader, MatrixSlice(parts=(part("mlp.down_proj", (0, 6)),), columns=(0, 768)))
    assert torch.equal(form.dequantize(dtype), library(kind, rows).to(dtype))


def test_a_byte_of_q4_0(tmp_path: Path) -> None:
    """Two numbers, of which the second is half a block on."""
    block = numpy.array([[*numpy.array([0.5], numpy.float16).tobytes(), 0x9F, *[0x88] * 15]], numpy.uint8)
    reader = opened(write(tmp_path / "a.gguf", {"blk.0.ffn_up.weight": ("Q4_0", block)}))
    wanted = MatrixSlice(parts=(part("mlp.up_proj", (0, 1)),), columns=(0, 32), num_columns=32)
    values = read_matrix(reader, wanted).dequantize(torch.float32)[0]
    assert (values[0], values[16], float(values.abs().sum())) == (3.5, 0.5, 4)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_rows_and_columns_of_a_rank(tmp_path: Path, kind: str) -> None:
    """Of columns that end inside of a group, too."""
    rows = random_rows(kind, 8, 768)
    path = write(tmp_path / "a.gguf", {"blk.0.ffn_down.weight": (kind, rows)})
    wanted = part("mlp.down_proj", (1, 3), (6, 8))
    with opened(path) as reader:
        for columns in ((0, 384), (384, 768), (48, 96), (720, 768)):
            form = read_matrix(reader, MatrixSlice(parts=(wanted,), columns=columns, num_columns=768))
            expected = library(kind, rows)[[1, 2, 6, 7], slice(*columns)]
            assert torch.equal(form.dequantize(torch.float32), expected)
        with pytest.raises(StartupError, match="shards cut groups of"):
            read_matrix(reader, MatrixSlice(parts=(wanted,), columns=(8, 104), num_columns=768))
        with pytest.raises(StartupError, match="the config asks for 512 at dimension 1"):
            read_matrix(reader, MatrixSlice(parts=(wanted,), columns=(0, 512), num_columns=512))


@pytest.mark.parametrize(("kind", "at"), [(kind, at) for kind in QUANTIZED for at in FACTORS.get(kind, (0,))])
def test_factors_that_are_not_numbers(tmp_path: Path, kind: str, at: int) -> None:
    """The second half of a block that has two scales its least values."""
    rows = random_rows(kind, 6, 768)
    rows[5, at : at + 2] = numpy.array([numpy.nan], dtype=numpy.float16).view(numpy.uint8)
    path = write(tmp_path / "a.gguf", {"blk.0.ffn_down.weight": (kind, rows)})
    message = r"mlp\.down_proj\.weight holds scales that are infinite or not numbers: its file is damaged$"
    with opened(path) as reader, pytest.raises(StartupError, match=message):
        read_matrix(reader, MatrixSlice(parts=(part("mlp.down_proj", (0, 6)),), columns=(0, 768)))


def test_neighbours_of_one_kind_are_one_matrix(tmp_path: Path) -> None:
    """As files of Q4_K_M are: q and k in Q4_K, v in Q6_K."""
    kinds = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K"}
    rows = {name: random_rows(kind, 8, 256, seed) for seed, (name, kind) in enumerate(kinds.items())}
    path = write(tmp_path / "a.gguf", {f"blk.0.{n}.weight": (kind, rows[n]) for n, kind in kinds.items()})
    order = HeadOrder(4, 4)
    parts = tuple(part(f"self_attn.{name}_proj", (0, 8), order=None if name == "v" else order) for name in "qkv")
    with opened(path) as reader:
        form = read_matrix(reader, MatrixSlice(parts=parts, columns=(0, 256), num_columns=256))
    assert isinstance(form, Stacked)
    assert [type(one) for one in form.forms] == [OffsetCodes, Codes]
    q, k, v = (library(kind, rows[name]) for name, kind in kinds.items())
    assert torch.equal(form.dequantize(torch.float32), torch.cat([order.apply(q), order.apply(k), v]))


@pytest.mark.parametrize("name", ["attn_q", "attn_k", "attn_v"])
def test_rows_of_llama_s_heads_are_halves_again(tmp_path: Path, name: str) -> None:
    """As `LlamaModel.permute` of llama.cpp's converter writes them, by the library's quantization."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    written = weight if name == "attn_v" else weight.view(2, 2, 4, 64).transpose(1, 2).reshape(16, 64)
    kind = gguf.GGMLQuantizationType.Q8_0
    tensors = {f"blk.0.{name}.weight": ("Q8_0", gguf.quants.quantize(written.numpy(), kind))}
    path = write(tmp_path / "a.gguf", tensors, kind="llama")
    with opened(path) as reader:
        module = f"self_attn.{name[-1]}_proj"
        form = read_matrix(reader, MatrixSlice(parts=(part(module, (0, 16)),), columns=(0, 64)))
    assert torch.equal(form.dequantize(torch.float32), library("Q8_0", gguf.quants.quantize(weight.numpy(), kind)))


def test_floats_are_plain_and_gemma_s_norms_are_less_one(tmp_path: Path) -> None:
    norm = numpy.array([1.5, 0.75, -2.0, 1.0], dtype=numpy.float32)
    matrix = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
    half = matrix.astype(numpy.float16)
    bits = torch.from_numpy(matrix).bfloat16().view(torch.uint8).numpy()
    tensors = {
        "output_norm.weight": ("F32", norm),
        "token_embd.weight": ("F16", half),
        "blk.0.ffn_up.weight": ("BF16", bits),
    }
    path = write(tmp_path / "a.gguf", tensors, kind="gemma2")
    with opened(path) as reader:
        assert torch.equal(reader.rows("model.norm.weight", [(0, 4)]), torch.from_numpy(norm) - 1)
        assert torch.equal(reader.rows("model.embed_tokens.weight", [(1, 3)]), torch.from_numpy(matrix)[1:])
        form = read_matrix(reader, MatrixSlice(parts=(part("mlp.up_proj", (0, 3)),), columns=(1, 3)))
    assert torch.equal(form.dequantize(torch.float32), torch.from_numpy(matrix)[:, 1:3])


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_products_are_those_of_the_decoded_matrix(
    tmp_path: Path, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    rows = random_rows(kind, 48, 512)
    path = write(tmp_path / "a.gguf", {"blk.0.ffn_down.weight": (kind, rows)})
    with opened(path, dtype) as reader:
        form = read_matrix(reader, MatrixSlice(parts=(part("mlp.down_proj", (0, 48)),), columns=(0, 512)))
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(48, generator=generator).to(dtype)
    product = LinearFactory(torch.device("cpu"), dtype).make(form, bias)
    expected_matrix = library(kind, rows).double()
    for num_rows in (1, 7, 64):
        x = torch.randn(num_rows, 512, generator=generator).to(dtype)
        exact = x.double() @ expected_matrix.t() + bias.double()
        scale = exact.abs().max()
        assert (product.wide(x).double() - exact).abs().max() / scale < tolerance
        assert (product(x).double() - exact).abs().max() / scale < tolerance
        assert product(x).dtype is dtype
        assert torch.equal(product.wide(x)[:1], product.wide(x[:1]))
