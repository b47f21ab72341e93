"""What adapters add, by the kernels in Triton's interpreter, against a loop over rows in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.triton_interpreter import mend

from model_server.kernels.lora_products import COLUMNS, SlotMatrices, add, rank_step

mend()

SLOTS = 4
# First and last of the outputs of each module, and which of the As it reads: q, (k has no adapter), v, and v again.
MODULES = ((0, 80, 0), (112, 122, 1), (122, 150, 1))


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def column_tiles(rank: int) -> Tensor:
    found, kept = [], 0
    for start, stop, number in MODULES:
        for first in range(start, stop, COLUMNS):
            found.append((first, min(first + COLUMNS, stop), number * rank, kept + first - start))
        kept += stop - start
    return torch.tensor(found, dtype=torch.int32).t().contiguous()


def matrices(depth: int, rank: int, dtype: torch.dtype, device: torch.device, *, affine: bool) -> SlotMatrices:
    kept = sum(stop - start for start, stop, _ in MODULES)
    a = noise(SLOTS, 2 * rank, depth, seed=1).div(depth**0.5).to(device, dtype)
    b = noise(SLOTS, kept, rank, seed=2).div(rank**0.5).to(device, dtype)
    changed = 1 + 0.3 * noise(SLOTS, 2, kept, seed=3).to(device) if affine else None
    return SlotMatrices(a, b, changed, column_tiles(rank).to(device))


def tiles_of(slots: list[int], rows: int, device: torch.device) -> Tensor:
    """Of the slot of each row, -1: none; with tiles that are not in use between those that are."""
    unused = [-1, *[0] * rows]
    found = [unused]
    for slot in range(SLOTS):
        members = [row for row, of in enumerate(slots) if of == slot]
        for first in range(0, len(members), rows):
            tile = members[first : first + rows]
            found += [[slot, *tile, *[-1] * (rows - len(tile))], unused]
    return torch.tensor(found, dtype=torch.int32, device=device)


def reference(given: SlotMatrices, slots: list[int], x: Tensor, out: Tensor) -> Tensor:
    wanted = out.double().cpu().clone()
    rank = given.b.shape[2]
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        inner = given.a[slot].double().cpu() @ x[row].double().cpu()
        kept = 0
        for start, stop, number in MODULES:
            b = given.b[slot, kept : kept + stop - start].double().cpu()
            wanted[row, start:stop] += b @ inner[number * rank : (number + 1) * rank]
            if given.affine is not None:
                gain, shift = given.affine[slot, :, kept : kept + stop - start].double().cpu()
                wanted[row, start:stop] = wanted[row, start:stop] * gain + shift
            kept += stop - start
    return wanted


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize(
    ("depth", "rank", "processors"), [(96, 8, 1), (130, 16, 64), (1536, 16, 64), (256, 32, 2), (64, 128, 4)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_each_row_gets_what_its_own_adapter_adds(
    device: torch.device, dtype: torch.dtype, depth: int, rank: int, processors: int, affine: bool, rows: int
) -> None:
    slots = [2, -1, 0, 2, 2, -1, 3, 0] + [2] * 17 + [-1, 0]
    given = matrices(depth, rank, dtype, device, affine=affine)
    x = noise(len(slots), depth, seed=4).to(device, dtype)
    base = noise(len(slots), 150, seed=5).to(device)
    for kind in (dtype, torch.float32):
        out = base.to(kind)
        before = out.clone()
        wanted = reference(given, slots, x, before)
        add(given, tiles_of(slots, rows, device), x, out, processors)
        error = (out.double().cpu() - wanted).norm() / wanted.norm()
        assert error < (1e-5 if dtype is torch.float32 else 1e-2)
        for row, slot in enumerate(slots):
            if slot < 0:
                assert torch.equal(out[row], before[row]), "rows of the base model keep their bits"
        assert torch.equal(out[:, 80:112], before[:, 80:112]), "outputs of no adapter too"


def test_a_row_does_not_depend_on_the_rows_of_other_adapters(device: torch.device) -> None:
    given = matrices(512, 16, torch.bfloat16, device, affine=False)
    x = noise(5, 512, seed=6).to(device, torch.bfloat16)
    found = []
    for others in ([0, 1, 1, 3, -1], [0, 2, -1, 0, 3]):
        out = torch.zeros(5, 150, dtype=torch.bfloat16, device=device)
        add(given, tiles_of(others, 16, device), x, out, 1)
        found.append(out[0])
    assert torch.equal(*found)


def test_rows_of_a_slice_and_a_step_without_tiles(device: torch.device) -> None:
    given = matrices(64, 16, torch.float32, device, affine=False)
    wide = noise(3, 100, seed=7).to(device)
    out, same = (torch.zeros(3, 150, device=device) for _ in range(2))
    add(given, tiles_of([1, 0, 1], 16, device), wide[:, 4:68], out, 8)
    add(given, tiles_of([1, 0, 1], 16, device), wide[:, 4:68].contiguous(), same, 8)
    assert torch.equal(out, same) and out.any()
    add(given, torch.empty(0, 17, dtype=torch.int32, device=device), wide[:, :64], same, 8)
    assert torch.equal(out, same)


def test_steps_of_the_rank() -> None:
    assert [rank_step(rank) for rank in (8, 16, 32, 64, 128, 256)] == [16, 16, 32, 64, 64, 64]
