"""Plain matrices that are quantized to nf4 and fp4 while they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity.protocol import assert_equal_logits, prompts, run_protocol
from safetensors.torch import load_file, save_file
from support.bitsandbytes_golden import golden
from support.dict_reader import DictReader
from support.loading import load
from support.quantized_folder import PLAIN
from support.tiny_models import tiny_checkpoint

from model_server.errors import StartupError
from model_server.quantization import onload
from model_server.quantization.forms import Stacked
from model_server.quantization.forms.table import TableCodes
from model_server.quantization.onload import QUANTIZERS
from model_server.quantization.scheme import Scheme
from model_server.weights.matrix import HeadOrder, MatrixSlice, Part
from model_server.weights.reader import Range

WEIGHT = torch.randn(32, 160, generator=torch.Generator().manual_seed(5))
METHODS = ["bitsandbytes-nf4", "bitsandbytes-fp4"]


def scheme_of(method: str) -> Scheme:
    return Scheme(method, quantize=QUANTIZERS[method])


def read(method: str, columns: Range = (0, 160), rows: tuple[Range, ...] = ((0, 32),)) -> TableCodes:
    part = Part("m", rows, 32)
    form = scheme_of(method).read(DictReader({"m.weight": WEIGHT}), MatrixSlice(parts=(part,), columns=columns))
    assert isinstance(form, TableCodes)
    return form


@pytest.mark.parametrize("method", METHODS)
def test_numbers_are_those_of_bitsandbytes(method: str) -> None:
    """Where whole blocks fit into a row, as in nearly all models."""
    vectors = golden(f"{method.removeprefix('bitsandbytes-')}-blocks")
    source = vectors["source"]
    num_rows, num_columns = source.shape
    part = Part("m", ((0, num_rows),), num_rows)
    wanted = MatrixSlice(parts=(part,), columns=(0, num_columns))
    form = scheme_of(method).read(DictReader({"m.weight": source}), wanted)
    assert isinstance(form, TableCodes)
    assert torch.equal(form.scales.flatten(), vectors["weight.absmax"])
    assert torch.equal(form.table, vectors["weight.quant_map"])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(form.dequantize(dtype), vectors[str(dtype).removeprefix("torch.")])
    assert form.nbytes == num_rows * num_columns // 2 + form.scales.nbytes + 64


@pytest.mark.parametrize(
    ("method", "codes"), [("bitsandbytes-nf4", [15, 0, 7, 12, 7, 7]), ("bitsandbytes-fp4", [3, 11, 0, 5, 0, 0])]
)
def test_the_codes_of_the_methods(method: str, codes: list[int]) -> None:
    weight = torch.tensor([[2.0, -2, 0, 1, *[0] * 60]])
    form = QUANTIZERS[method](weight, (0, 64), "m")
    assert isinstance(form, TableCodes)
    assert form.scales.tolist() == [[2]]
    assert form.codes[0, :3].tolist() == [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]


@pytest.mark.parametrize("method", METHODS)
def test_each_number_becomes_the_nearest_of_its_block(method: str) -> None:
    form = read(method)
    table = form.table
    for block, start in enumerate(range(0, 160, 64)):
        part = WEIGHT[:, start : start + 64]
        largest = part.abs().amax(1, keepdim=True)
        assert torch.equal(form.scales[:, block : block + 1], largest)
        nearest = table[(part[:, :, None] / largest[:, :, None] - table).abs().argmin(2)] * largest
        error = (form.dequantize(torch.float32)[:, start : start + 64] - part).abs()
        assert torch.allclose(error, (nearest - part).abs(), atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("columns", [(0, 80), (80, 160), (64, 128), (128, 160), (16, 48)])
def test_blocks_are_those_of_the_whole_row(method: str, columns: Range, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that keeps some columns has the numbers of one that keeps all, whatever the size of the pieces read."""
    whole = read(method).dequantize(torch.float32)
    for piece_bytes in (1, 5000, 2**20):
        monkeypatch.setattr(onload, "PIECE_BYTES", piece_bytes)
        some = read(method, columns, ((0, 8), (16, 32)))
        kept = torch.cat([whole[:8], whole[16:]])[:, slice(*columns)]
        assert torch.equal(some.dequantize(torch.float32), kept)


@pytest.mark.parametrize("method", METHODS)
def test_rows_orders_and_merged_parts(method: str) -> None:
    whole = read(method)
    exact = whole.dequantize(torch.float32)
    assert torch.equal(whole.rows(3, 9).dequantize(torch.float32), exact[3:9])
    rows = torch.tensor([5, 0, 31])
    assert torch.equal(whole.permuted(rows).dequantize(torch.float32), exact[rows])
    reader = DictReader({f"{name}.weight": WEIGHT for name in "qk"} | {"v.weight": 2 * WEIGHT})
    order = HeadOrder(8, 8)
    parts = (*(Part(name, ((0, 32),), 32, order) for name in "qk"), Part("v", ((0, 32),), 32))
    fused = scheme_of(method).read(reader, MatrixSlice(parts=parts, columns=(0, 160)))
    assert isinstance(fused, TableCodes)
    assert torch.equal(fused.dequantize(torch.float32), torch.cat([order.apply(exact), order.apply(exact), 2 * exact]))


@pytest.mark.parametrize("method", METHODS)
def test_zeros_odd_widths_and_transposed_matrices(method: str) -> None:
    tensors = {"zero.weight": torch.zeros(4, 48), "odd.weight": WEIGHT[:, :71].clone(), "t.weight": WEIGHT.t().clone()}
    reader, scheme = DictReader(tensors), scheme_of(method)

    def decoded(name: str, num_rows: int, num_columns: int, *, transposed: bool = False) -> torch.Tensor:
        part = Part(name, ((0, num_rows),), num_rows)
        wanted = MatrixSlice(parts=(part,), columns=(0, num_columns), transposed=transposed)
        return scheme.read(reader, wanted).dequantize(torch.float32)

    assert torch.equal(decoded("zero", 4, 48), torch.zeros(4, 48))
    assert torch.equal(decoded("odd", 32, 71)[:, :64], read(method).dequantize(torch.float32)[:, :64])
    assert torch.equal(decoded("t", 32, 160, transposed=True), read(method).dequantize(torch.float32))


def test_blocks_that_would_be_cut_too_small() -> None:
    with pytest.raises(StartupError) as refusal:
        read("bitsandbytes-nf4", (40, 80))
    assert str(refusal.value) == (
        "weight m: 4 shards cut groups of 64 into pieces of 8; at least 16 are needed: use --num-shard 2"
    )


def test_forms_of_two_tables_stay_apart() -> None:
    from model_server.quantization.forms.table import cat

    both = cat([read("bitsandbytes-nf4"), read("bitsandbytes-fp4")])
    assert isinstance(both, Stacked)


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gpt2"])
def test_models(model_type: str, tmp_path: Path) -> None:
    """What a plain model of the same numbers computes; embeddings, heads and routers stay plain."""
    source = tiny_checkpoint(model_type, tmp_path / "source", with_tokenizer=False)
    decoded = tiny_checkpoint(model_type, tmp_path / "decoded", with_tokenizer=False)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not any(part in name for part in PLAIN):
            turned = tensor.t() if model_type == "gpt2" else tensor
            form = QUANTIZERS["bitsandbytes-nf4"](turned, (0, turned.shape[1]), name)
            exact = form.dequantize(torch.float32)
            tensors[name] = (exact.t() if model_type == "gpt2" else exact).contiguous()
        elif tensor.dim() == 3 and "experts" in name:
            exact = [QUANTIZERS["bitsandbytes-nf4"](m, (0, m.shape[1]), name).dequantize(torch.float32) for m in tensor]
            tensors[name] = torch.stack(exact)
    save_file(tensors, decoded / "model.safetensors", metadata={"format": "pt"})
    sequences = prompts(512)
    quantized, plain = load(source, quantize="bitsandbytes-nf4"), load(decoded)
    assert (quantized.traits.weight_bytes or 0) < 0.6 * (plain.traits.weight_bytes or 0)
    assert_equal_logits(run_protocol(quantized, sequences, 4), run_protocol(plain, sequences, 4))
