"""Slots of adapters alone on the stand-in: what is copied there is queued from pinned memory, and what is added is what
the CPU adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from engines import CARD, CPU
from stand_in.counters import Counter, counted
from torch import Tensor

from model_server.adapters.expert_slots import ExpertFactors, ExpertShape, ExpertSlots
from model_server.adapters.factors import EmbeddingFactors, Factors, HeadRows, TableRows, held_bytes, joined, pinned
from model_server.adapters.product_slots import ProductSlots, SlotSizes
from model_server.adapters.row_slots import EmbeddingSlots, HeadSlots, RowSizes
from model_server.adapters.rows import BASE, AdapterRows, CurrentRows, RowAdapters, adapter_rows
from model_server.models.adapters.heads import AdaptedHeads, HeadSizes
from model_server.models.adapters.linear import Addition
from model_server.weights.matrix import Part
from model_server.weights.products import Product

pytestmark = pytest.mark.short

INPUTS = 48
PARTS = (Part("q", ((0, 32),), 32), Part("v", ((3, 19),), 32))
HEADS = HeadSizes(heads=3, plain=5, value=4, latent=6)
SIZES = SlotSizes(number=2, rank=8)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@contextmanager
def queued_copies() -> Iterator[None]:
    """Inside, the host waits for no copy to the card, and copies from pinned memory alone."""
    with counted() as grown:
        yield
    assert (grown[Counter.PAGEABLE_UPLOADS], grown[Counter.WAITING_COPIES]) == (0, 0)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 4


def test_pinned_adapters_count_what_torch_takes_for_them() -> None:
    held = torch.zeros(3, 100)
    moved = pinned(held)
    assert moved.is_pinned()
    assert (held_bytes(held), held_bytes(moved, None)) == (1200, 2048)


# ---- Products


def _factors(rank: int, seed: int) -> Factors:
    modules = [
        (noise(rank, INPUTS, seed=seed), noise(32, rank, seed=seed + 1), 0),
        (noise(rank, INPUTS, seed=seed + 2), noise(16, rank, seed=seed + 3), 32),
    ]
    return joined(modules, 1 + noise(48, seed=seed + 4), noise(48, seed=seed + 5))


@pytest.mark.usefixtures("order")
def test_adapters_that_take_a_slot_in_turn() -> None:
    slots = ProductSlots(PARTS, {"q", "v"}, INPUTS, SIZES, torch.float32, CARD, affine=True)
    numbers = np.array([1, BASE, 0, 1], np.int64)
    rows = adapter_rows(numbers, None, CARD)
    assert rows is not None and rows.all.tiles is not None
    x, base = noise(4, INPUTS, seed=1), noise(4, 48, seed=2)
    held: dict[int, Factors] = {}
    for slot, given in ((0, _factors(8, 10)), (1, _factors(4, 20)), (0, _factors(3, 30))):
        on_host = pinned(given)
        with queued_copies():
            slots.write(slot, on_host)
        held[slot] = given
        out, wanted = base.to(CARD), base.clone()
        slots.add(rows, x.to(CARD), out)
        for number, factors in held.items():
            index = torch.from_numpy(np.flatnonzero(numbers == number))
            part = wanted[index]
            factors.add(x[index], part)
            wanted[index] = part
        torch.testing.assert_close(out.cpu(), wanted, rtol=1e-5, atol=1e-5)


# ---- Experts, embedding, head, latents


def _in_experts(device: torch.device) -> list[Tensor]:
    shape = ExpertShape(num_experts=3, inputs=16, outputs=24, modules=2)
    slots = ExpertSlots(shape, SIZES, torch.float32, device, affine=True)
    for rank, seed in ((8, 1), (4, 10)):
        factors = ExpertFactors(
            noise(3, 2, rank, 16, seed=seed), noise(3, 24, rank, seed=seed + 1), noise(3, 24, seed=seed + 2), None
        )
        on_host = pinned(factors)
        with queued_copies():
            slots.write(1, on_host)
    assert slots.affine is not None
    return [slots.a, slots.b, slots.affine]


def _in_embedding(device: torch.device) -> list[Tensor]:
    slots = EmbeddingSlots(2, RowSizes(num_rows=3, rank=4), 20, 16, torch.float32, device)
    rows = TableRows(torch.tensor([3, 17]), noise(2, 16, seed=1))
    factors = EmbeddingFactors(
        rows=rows, a=noise(20, 2, seed=2), b=noise(16, 2, seed=3), gain=noise(16, seed=4).float()
    )
    on_host = pinned(factors)
    with queued_copies():
        there = slots.write(1, on_host)
    ids = torch.tensor([3, 4, 17, 0], device=device)
    return [there.of(ids, noise(4, 16, seed=5).to(device))]


def _in_head(device: torch.device) -> list[Tensor]:
    slots = HeadSlots(2, 3, 16, torch.float32, device)
    on_host = pinned(HeadRows(torch.tensor([5, 1]), noise(2, 16, seed=1), noise(2, seed=2)))
    with queued_copies():
        there = slots.write(0, on_host)
    out = noise(4, 8, seed=3).to(device)
    there.replace(noise(4, 16, seed=4).to(device), out, slice(1, 3))
    return [out]


def _in_latents(device: torch.device) -> list[Tensor]:
    outputs = HEADS.heads * (HEADS.plain + HEADS.value)
    product = Product(parts=(Part("kv_b_proj", ((0, outputs),), outputs),), columns=None, weight=lambda: torch.empty(0))
    found = AdaptedHeads(product, HEADS, CurrentRows(), SIZES, torch.float32, device, affine=True)
    for number, rank in enumerate((8, 2)):
        matrices = noise(rank, HEADS.latent, seed=number), noise(outputs, rank, seed=3 + number), 0
        factors = joined([matrices], 1 + noise(outputs, seed=5), noise(outputs, seed=6))
        found.put(number, Addition(pinned(factors)))
    for slot, number in ((1, 0), (0, 1), (1, 1), (1, 0)):
        with queued_copies():
            found.fill(slot, number)
    numbers = torch.tensor([1, BASE, 0, 1])
    rows = AdapterRows(*[RowAdapters(torch.full((4,), BASE), device, slots=numbers.int().to(device))] * 2)
    plain, attended, absorbed, values = (
        noise(4, HEADS.heads, width, seed=7).to(device)
        for width in (HEADS.plain, HEADS.latent, HEADS.latent, HEADS.value)
    )
    found.absorb(found.scaled(plain, rows), absorbed, rows)
    return [absorbed, found.values(attended, values, rows)]


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("written", [_in_experts, _in_embedding, _in_head, _in_latents])
def test_what_is_in_slots_is_what_a_cpu_has_there(written: Callable[[torch.device], list[Tensor]]) -> None:
    for on_card, on_cpu in zip(written(CARD), written(CPU), strict=True):
        torch.testing.assert_close(on_card.cpu(), on_cpu, rtol=1e-5, atol=1e-5)
