"""Decode GEMMs in Triton's interpreter against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from support.triton_interpreter import mend

from model_server.kernels import matmul
from model_server.kernels.matmul import TileConfig

mend()

SMALL = (TileConfig(True, 4, 64, 4), TileConfig(False, 16, 32, 4, 2), TileConfig(False, 64, 128, 4, 4))


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("tiles", SMALL, ids=["vector", "narrow", "wide"])
@pytest.mark.parametrize(
    ("num_rows", "width", "depth", "processors"),
    [(1, 64, 256, 1), (1, 33, 129, 4), (2, 5, 7, 1), (7, 100, 2048, 8), (16, 64, 1100, 64), (17, 70, 96, 2),
     (32, 16, 1536, 3)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_products(
    device: torch.device, num_rows: int, width: int, depth: int, processors: int, tiles: TileConfig, biased: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    if tiles.vector and num_rows > 1:
        return
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, depth, generator=generator).to(device, dtype)
    weight = torch.randn(width, depth, generator=generator).div(depth**0.5).to(device, dtype)
    bias = torch.randn(width, generator=generator).to(device, dtype) if biased else None
    actual = matmul.multiply(x, weight, bias, tiles, processors)
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert actual.shape == wanted.shape
    assert actual.dtype == dtype
    assert (actual.double() - wanted).norm() / wanted.norm() < 1e-2
    assert torch.equal(matmul.multiply(x, weight, bias, tiles, processors), actual)
    wide = torch.empty(actual.shape, dtype=torch.float32, device=x.device)
    assert matmul.multiply(x, weight, bias, tiles, processors, wide.dtype, wide) is wide
    assert wide.dtype == torch.float32
    assert (wide.double() - wanted).norm() / wanted.norm() < 1e-5


def test_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device) -> None:
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    tiles = matmul.STREAM_TILES[0]
    together = matmul.multiply(x, weight, None, tiles, 4)
    others = x.clone()
    others[1:] = 3.0
    assert torch.equal(matmul.multiply(others, weight, None, tiles, 4)[0], together[0])


@pytest.mark.parametrize(("blocks", "depth"), [(64, 4096), (448, 4096), (64, 14336), (1, 100), (16, 768), (2, 100000)])
def test_parts_cover_the_sum(blocks: int, depth: int) -> None:
    num_parts, share = matmul.parts(blocks, depth, 128, 132)
    assert share % 128 == 0
    assert (num_parts - 1) * share < depth <= num_parts * share
    assert num_parts == 1 or blocks * num_parts <= 2 * 132


def test_tile_configs() -> None:
    assert all(not tiles.vector for tiles in matmul.tile_configs(2))
    assert any(tiles.vector for tiles in matmul.tile_configs(1))


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_invariant_product_gives_a_row_the_same_bits_in_any_batch(
    device: torch.device, dtype: torch.dtype, biased: bool
) -> None:
    depth, width = 200, 150
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> torch.Tensor:
        # In the interpreter a CPU library multiplies, whose last bits may depend on a row's place; eighths are exact.
        found = torch.randn(*shape, generator=generator)
        return (found if device.type == "cuda" else found.mul(4).round().div(8)).to(device, dtype)

    x, weight = numbers(131, depth), numbers(width, depth)
    bias = numbers(width) if biased else None
    together = matmul.multiply_invariant(x, weight, bias)
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert (together.double() - wanted).norm() / wanted.norm() < 1e-2
    for first, last in ((0, 1), (63, 65), (17, 100), (130, 131)):
        assert torch.equal(matmul.multiply_invariant(x[first:last], weight, bias), together[first:last])
    assert matmul.multiply_invariant(x[:0], weight, bias).shape == (0, width)
