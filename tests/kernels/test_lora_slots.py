"""Adapters in slots by the kernels in Triton's interpreter, against what their matrices add in plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.triton_interpreter import mend

from model_server.adapters.factors import Expansion, Factors, joined
from model_server.adapters.product_slots import ProductSlots, SlotSizes
from model_server.adapters.rows import BASE, adapter_rows
from model_server.weights.matrix import Part

mend()

INPUTS = 48
PARTS = (Part("q", ((0, 80),), 80), Part("k", ((0, 32),), 32), Part("v", ((3, 35),), 64))
OUTPUTS = 144


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 4


def factors(rank: int, names: str, seed: int, *, affine: bool = False) -> Factors:
    """Of the parts whose names are in `names`."""
    starts = {"q": 0, "k": 80, "v": 112}
    sizes = {part.name: part.num_kept for part in PARTS}
    modules = [
        (noise(rank, INPUTS, seed=seed + i), noise(sizes[name], rank, seed=seed + 9 + i), starts[name])
        for i, name in enumerate(names)
    ]
    gain = shift = None
    if affine:
        gain, shift = torch.ones(OUTPUTS), torch.zeros(OUTPUTS)
        gain[:80], shift[:80] = 1 + noise(80, seed=seed), noise(80, seed=seed + 1)
    return joined(modules, gain, shift)


def pinned(given: Factors, device: torch.device) -> Factors:
    return (
        given
        if device.type == "cpu"
        else Factors(
            a=given.a.pin_memory(),
            expansions=tuple(Expansion(e.start, e.stop, e.first, e.b.pin_memory()) for e in given.expansions),
            gain=given.gain,
            shift=given.shift,
        )
    )


@pytest.mark.parametrize("wide", [False, True], ids=["narrow tiles", "wide tiles"])
def test_slots_that_are_filled_again(device: torch.device, wide: bool) -> None:
    """A smaller adapter after a larger one, other modules, and none: nothing of the one before is left."""
    slots = ProductSlots(PARTS, {"q", "v"}, INPUTS, SlotSizes(number=2, rank=16), torch.float32, device, affine=True)
    numbers = np.array([1, BASE, 0, 1, 1, 0, BASE] * (74 if wide else 1), np.int64)
    rows = adapter_rows(numbers, None, device)
    assert rows is not None and rows.all.tiles is not None and rows.all.tiles.shape[1] == (65 if wide else 17)
    x = noise(len(numbers), INPUTS, seed=1)
    base = noise(len(numbers), OUTPUTS, seed=2)
    held: dict[int, Factors | None] = {0: None, 1: None}
    for slot, given in (
        (0, factors(16, "qv", 10, affine=True)),
        (1, factors(8, "q", 30)),
        (0, factors(4, "v", 50)),
        (1, None),
    ):
        slots.write(slot, None if given is None else pinned(given, device))
        held[slot] = given
        out, wanted = base.to(device), base.clone()
        slots.add(rows, x.to(device), out)
        for number, one in held.items():
            index = torch.from_numpy(np.flatnonzero(numbers == number))
            if one is not None:
                part = wanted[index]
                one.add(x[index], part)
                wanted[index] = part
        torch.testing.assert_close(out.cpu(), wanted, rtol=1e-5, atol=1e-5)
