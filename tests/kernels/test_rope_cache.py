"""Norm, rotation and cache in one kernel, against plain torch in float64 and in the model's own types."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.kernels.cache_writes import rope
from model_server.layers.fused.fused import HeadLayout
from model_server.layers.fused.torch import TorchFused
from model_server.layers.rotary import Rope, Rotary, Rotations

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True)
class Sizes:
    """rotary: how much of a head rotates; norm: "", "shared" (one weight for all heads) or "each"."""

    num_heads: int
    num_kv_heads: int
    dim: int
    rotary: int
    norm: str = ""

    @property
    def layout(self) -> HeadLayout:
        return HeadLayout(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.dim, rotary_dim=self.rotary
        )

    @property
    def width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.dim


SIZES = [
    Sizes(4, 4, 64, 64), Sizes(8, 2, 128, 128), Sizes(3, 1, 80, 32), Sizes(9, 3, 96, 96, "shared"),
    Sizes(32, 8, 16, 16, "each"), Sizes(4, 1, 256, 256, "shared"), Sizes(7, 1, 64, 0), Sizes(5, 5, 20, 0, "each"),
    Sizes(2, 1, 6, 2, "shared"),
]  # fmt: skip


@dataclass
class Given:
    """A step's tensors. qkv is a part of wider rows; slots jump about; the cache is full of NaN."""

    sizes: Sizes
    qkv: Tensor
    rows: Tensor
    slots: Tensor
    rotations: Rotations | None
    weight: Tensor | None

    def run(self, **scales: float) -> None:
        s = self.sizes
        rope.rotate_write(
            self.qkv, self.rows, self.slots,
            num_heads=s.num_heads, num_kv_heads=s.num_kv_heads, head_dim=s.dim,
            table=None if self.rotations is None else self.rotations.real_table,
            positions=None if self.rotations is None else self.rotations.positions,
            weight=self.weight, eps=1e-6, **scales,
        )  # fmt: skip

    def wanted(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """What qkv must become."""
        s, tokens = self.sizes, len(self.qkv)
        heads = self.qkv.to(dtype).view(tokens, -1, s.dim)
        rotated = heads[:, : s.num_heads + s.num_kv_heads]
        if self.weight is not None:
            rotated = F.rms_norm(rotated, (s.dim,), None, 1e-6) * self.weight.to(dtype)
        if self.rotations is not None:
            pairs = torch.view_as_complex(rotated[..., : s.rotary].reshape(tokens, -1, s.rotary // 2, 2).contiguous())
            turned = torch.view_as_real(pairs * self.rotations.gathered).flatten(2)
            rotated = torch.cat((turned, rotated[..., s.rotary :]), dim=-1)
        return torch.cat((rotated, heads[:, s.num_heads + s.num_kv_heads :]), dim=1).flatten(1)


def given(
    device: torch.device, sizes: Sizes, dtype: torch.dtype, tokens: int, cache: torch.dtype | None = None
) -> Given:
    generator = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(tokens, sizes.width + 24, generator=generator).to(device, dtype)[:, 8 : 8 + sizes.width]
    rows = torch.full((2 * tokens + 3, 2 * sizes.num_kv_heads * sizes.dim), math.nan).to(cache or dtype).to(device)
    slots = torch.randperm(2 * tokens + 3, generator=generator)[:tokens].to(device)
    rotations = weight = None
    if sizes.rotary:
        rotary = Rotary(Rope("default", 100.0, sizes.rotary, 300), device)
        rotations = rotary.rotations(torch.randint(0, 300, (tokens,), generator=generator).to(device), 300)
    if sizes.norm:
        shape = (sizes.num_heads + sizes.num_kv_heads, sizes.dim)[int(sizes.norm == "shared") :]
        weight = torch.randn(*shape, generator=generator).to(device)
    return Given(sizes, qkv, rows, slots, rotations, weight)


def error(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rotate_write(device: torch.device, sizes: Sizes, tokens: int, dtype: torch.dtype) -> None:
    case = given(device, sizes, dtype, tokens)
    wanted, around = case.wanted(), case.qkv.untyped_storage().nbytes()
    values = case.qkv[:, (sizes.num_heads + sizes.num_kv_heads) * sizes.dim :].clone()
    case.run()
    assert error(case.qkv, wanted) < TOLERANCE[dtype]
    assert torch.equal(case.qkv[:, (sizes.num_heads + sizes.num_kv_heads) * sizes.dim :], values)
    # The cache holds the very numbers that attention reads, in those rows and no others.
    assert torch.equal(case.rows[case.slots], case.qkv[:, sizes.num_heads * sizes.dim :])
    others = torch.ones(len(case.rows), dtype=torch.bool, device=device).index_fill_(0, case.slots, False)
    assert case.rows[others].isnan().all()
    assert case.qkv.untyped_storage().nbytes() == around


@pytest.mark.parametrize("sizes", SIZES[:5], ids=str)
def test_as_plain_torch(device: torch.device, sizes: Sizes) -> None:
    kernel, plain = (given(device, sizes, torch.float32, 3) for _ in range(2))
    kernel.run()
    norm = None if plain.weight is None else TorchFused().rms_norm(plain.weight, 1e-6)
    TorchFused().rotate_write(plain.qkv, sizes.layout, norm, plain.rotations, plain.rows, plain.slots)
    torch.testing.assert_close(kernel.qkv, plain.qkv, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kernel.rows, plain.rows, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_numbers_around_a_part_of_a_row_stay(device: torch.device) -> None:
    sizes = SIZES[2]
    buffer = torch.randn(3, sizes.width + 10).to(device)
    before, case = buffer.clone(), given(device, sizes, torch.float32, 3)
    case.qkv = buffer[:, 4 : 4 + sizes.width]
    case.run()
    assert torch.equal(buffer[:, :4], before[:, :4])
    assert torch.equal(buffer[:, 4 + sizes.width :], before[:, 4 + sizes.width :])


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float8_cache(device: torch.device, dtype: torch.dtype, cache: torch.dtype) -> None:
    """Divided by the scales, to the nearest, bounded; NaN stays NaN."""
    sizes = Sizes(4, 2, 32, 0)
    case, plain = (given(device, sizes, dtype, 4, cache) for _ in range(2))
    for one in (case, plain):
        one.qkv[0, 4 * 32] = 1e5
        one.qkv[1, 6 * 32 + 3] = -1e5
        one.qkv[2, 4 * 32 + 1] = math.nan
    case.run(key_scale=0.05, value_scale=0.5)
    layout = HeadLayout(num_heads=4, num_kv_heads=2, head_dim=32, rotary_dim=0, key_scale=0.05, value_scale=0.5)
    TorchFused().rotate_write(plain.qkv, layout, None, None, plain.rows, plain.slots)
    assert torch.equal(case.qkv.nan_to_num(), plain.qkv.nan_to_num())
    got, wanted = (one.rows[one.slots.cpu()].float() for one in (case, plain))
    bound = torch.finfo(cache).max
    assert (got[0, 0], got[1, 2 * 32 + 3]) == (bound, -bound)
    if device.type == "cpu":
        # The interpreter knows no NaN in float8, rounds ties otherwise, and loses the carry where rounding leads to the
        # next power of two.
        got[2, 1] = wanted[2, 1]
        got = torch.where(2 * got == wanted, wanted, got)
    step = torch.finfo(cache).eps if device.type == "cpu" else 0.0
    torch.testing.assert_close(got, wanted, rtol=step, atol=step / 64, equal_nan=True)


def test_no_tokens(device: torch.device) -> None:
    case = given(device, SIZES[0], torch.float32, 0)
    case.run()
    assert case.rows.isnan().all()


def test_what_has_no_kernel_is_refused(device: torch.device) -> None:
    case = given(device, SIZES[0], torch.float32, 2)
    rows, slots, qkv = case.rows, case.slots, case.qkv
    for field, wrong, message in (
        ("qkv", qkv[:, 1:], "no kernel for q, k and v"),
        ("rows", rows[:, 1:], "no kernel for cache rows"),
        ("rows", rows.half(), "no kernel for torch.float32 in a cache of torch.float16"),
        ("slots", slots.int(), "slots of shape"),
        ("weight", torch.ones(63), "a weight of shape"),
        ("rotations", Rotations(torch.ones(4, 33, dtype=torch.complex64), slots), "a table of rotations of shape"),
        ("rotations", Rotations(torch.ones(4, 32, dtype=torch.complex64), slots[:1]), "positions of shape"),
    ):
        case = given(device, SIZES[0], torch.float32, 2)
        setattr(case, field, wrong)
        with pytest.raises(ValueError, match=message):
            case.run()
