"""The rows of a decoding batch one token further by one kernel: what plain torch computes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from support.triton_interpreter import mend

from model_server.batch.advance import advance_on, plain
from model_server.kernels.advance import advance_rows

mend()


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("rows", [0, 1, 127, 130])
def test_as_plain_torch(device: torch.device, rows: int, block_size: int) -> None:
    """Tables that are a part of wider ones; the first rows stay in their block, enter the next, and begin."""
    seeds = torch.Generator().manual_seed(rows)
    wide = torch.randint(1, 90_000, (rows, 9), generator=seeds, dtype=torch.int32).to(device)
    positions = torch.randint(-1, 7 * block_size - 4, (rows,), generator=seeds)
    positions[:3] = torch.tensor([block_size - 2, block_size - 1, -1])[:rows]
    found = []
    for function in (plain, advance_rows):
        moved = positions.clone().to(device)
        kv_lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        slots = torch.zeros(rows, dtype=torch.int64, device=device)
        for _ in range(3):
            function(moved, wide[:, :7], block_size, kv_lengths, slots)
        found.append((moved, kv_lengths, slots))
    for expected, actual in zip(*found, strict=True):
        assert torch.equal(expected, actual)
    assert found[1][1].tolist() == (positions + 4).tolist()


def test_kernels_are_chosen_where_they_run(device: torch.device) -> None:
    assert advance_on(device) is advance_rows
