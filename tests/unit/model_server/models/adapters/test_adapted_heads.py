"""What adapters in slots make of latents, where which row has which is known on the device alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_server.adapters.factors import joined
from model_server.adapters.product_slots import SlotSizes
from model_server.adapters.rows import BASE, AdapterRows, CurrentRows, RowAdapters
from model_server.models.adapters.heads import AdaptedHeads, HeadSizes
from model_server.models.adapters.linear import Addition
from model_server.weights.matrix import Part
from model_server.weights.products import Product

CPU = torch.device("cpu")
SIZES = HeadSizes(heads=3, plain=5, value=4, latent=6)
OUTPUTS = SIZES.heads * (SIZES.plain + SIZES.value)


def heads_with_three(*, affine: bool) -> AdaptedHeads:
    """Adapters of several ranks in three slots; the second slot had another one before."""
    product = Product(parts=(Part("kv_b_proj", ((0, OUTPUTS),), OUTPUTS),), columns=None, weight=lambda: torch.empty(0))
    found = AdaptedHeads(product, SIZES, CurrentRows(), SlotSizes(number=3, rank=8), torch.float32, CPU, affine=affine)
    dice = torch.Generator().manual_seed(1)
    for number, rank in enumerate((8, 2, 4)):
        changed = [torch.rand(OUTPUTS, generator=dice) + 0.5 if affine and number != 2 else None for _ in range(2)]
        matrices = torch.randn(rank, SIZES.latent, generator=dice), torch.randn(OUTPUTS, rank, generator=dice), 0
        found.put(number, Addition(joined([matrices], *changed)))
    for slot, number in ((1, 0), (0, 2), (1, 1), (2, 7)):  # 7 changes nothing here
        assert not found.fill(slot, number)
    return found


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
def test_rows_by_the_device_are_those_by_the_host(affine: bool) -> None:
    subject = heads_with_three(affine=affine)
    numbers = torch.tensor([1, BASE, 0, 1, 2, BASE, 0])
    count = len(numbers)
    by_host = AdapterRows(*[RowAdapters(numbers, CPU)] * 2)
    nothing = torch.full((count,), BASE)  # as a captured step has it
    by_device = AdapterRows(*[RowAdapters(nothing, CPU, slots=numbers.int())] * 2)
    plain, attended = noise(count, SIZES.heads, SIZES.plain), noise(count, SIZES.heads, SIZES.latent)
    found = []
    for rows in (by_host, by_device):
        scaled = subject.scaled(plain, rows)
        absorbed = noise(count, SIZES.heads, SIZES.latent)
        subject.absorb(scaled, absorbed, rows)
        values = subject.values(attended, noise(count, SIZES.heads, SIZES.value), rows)
        found.append((scaled, absorbed, values))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    base = (numbers == BASE) | (numbers == 2)
    unchanged = plain, noise(count, SIZES.heads, SIZES.latent), noise(count, SIZES.heads, SIZES.value)
    for ours, before in zip(found[1], unchanged, strict=True):
        assert torch.equal(ours[base], before[base])
        is_changed = affine or before is not plain
        assert torch.equal(ours[numbers == 1], before[numbers == 1]) != is_changed
