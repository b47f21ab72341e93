"""Norm, rotations and cache of latent attention in one kernel, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.triton_interpreter import mend

from model_server.kernels.cache_writes.latent import latent_write
from model_server.layers.fused.fused import Fused
from model_server.layers.fused.torch import TorchFused
from model_server.layers.fused.triton import TritonFused
from model_server.layers.rotary import Rope, Rotary

mend()

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def run(
    fused: Fused,
    device: torch.device,
    dtype: torch.dtype,
    cache: torch.dtype,
    heads: int,
    rank: int,
    dim: int,
    n: int,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """What is returned, what is rotated to and the cache. The inputs are parts of wider rows; slots jump about."""
    seeds = torch.Generator().manual_seed(heads + rank)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=seeds).to(device, dtype)

    norm = fused.rms_norm(noise(rank).float(), 1e-6)
    latent, queries, wide = noise(n, 4 + rank + dim)[:, 4:], noise(n, heads, dim + 6), noise(n, heads, rank + dim)
    rotated = queries[..., :dim]
    turned = rotated if in_place else wide[..., rank:]
    rotations = Rotary(Rope("default", 10_000.0, dim, 64), device).rotations(
        torch.arange(n, device=device) * 7, 7 * n + 1
    )
    rows = torch.zeros(2 * n + 3, rank + dim, dtype=cache, device=device)
    slots = torch.randperm(2 * n + 3, generator=seeds)[:n].to(device)
    given = fused.latent_write(latent, norm, rotated, turned, rotations, rows, slots)
    return given, queries if in_place else wide, rows.float()


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=["same", "e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("heads", "rank", "dim", "n"), [(16, 64, 32, 5), (3, 24, 6, 4), (1, 16, 2, 1), (40, 32, 64, 2)]
)
def test_as_plain_torch(
    device: torch.device,
    heads: int,
    rank: int,
    dim: int,
    n: int,
    dtype: torch.dtype,
    cache: torch.dtype | None,
    in_place: bool,
) -> None:
    shape = (dtype, cache or dtype, heads, rank, dim, n, in_place)
    wanted = run(TorchFused(), device, *shape)
    actual = run(TritonFused(device), device, *shape)
    for tensor, expected in zip(actual[:2], wanted[:2], strict=True):
        assert tensor.dtype == dtype
        torch.testing.assert_close(tensor, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    got = actual[2]
    if cache is not None and device.type == "cpu":
        # The interpreter rounds ties to float8 otherwise, and loses the carry where rounding leads to the next power.
        got = torch.where(2 * got == wanted[2], wanted[2], got)
    step = TOLERANCE[dtype] if cache is None else torch.finfo(cache).eps
    torch.testing.assert_close(got, wanted[2], rtol=step, atol=TOLERANCE[dtype] if cache is None else step / 64)


def test_no_tokens(device: torch.device) -> None:
    given, queries, rows = run(TritonFused(device), device, torch.float32, torch.float32, 2, 16, 4, 0)
    assert given.shape == (0, 20) and queries.shape == (0, 2, 20) and not rows.any()


def test_other_shapes_are_refused(device: torch.device) -> None:
    table, slots = torch.ones(4, 6, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    latent, weight = torch.ones(1, 20, device=device), torch.ones(16, device=device)
    with pytest.raises(ValueError, match="a norm of 16 and rotations of 6"):
        rotated = torch.ones(1, 2, 4, device=device)
        latent_write(latent, weight, 1e-6, rotated, rotated, table, slots, latent, slots)
