"""What adapters add to experts, by the kernels in Triton's interpreter, against a loop over tokens in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.triton_interpreter import mend

from model_server.adapters.expert_slots import ExpertFactors, ExpertShape, ExpertSlots
from model_server.adapters.product_slots import SlotSizes
from model_server.adapters.rows import BASE, CurrentRows, adapter_rows
from model_server.kernels.moe import placement
from model_server.layers.activation import clamped_swiglu, gated
from model_server.layers.experts.experts import ExpertWeights
from model_server.layers.experts.triton import TritonExperts
from model_server.quantization.forms import Plain
from model_server.quantization.forms.codes import Codes
from model_server.weights.products import Product

mend()

NUM, HIDDEN, SIZE, TOP_K, SLOTS = 5, 40, 24, 2, 3
PRODUCT = Product(parts=(), columns=None, weight=lambda: torch.empty(0))


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def factors(shape: ExpertShape, rank: int, seed: int, *, affine: bool) -> ExpertFactors:
    outputs = shape.num_experts, shape.outputs
    return ExpertFactors(
        noise(shape.num_experts, shape.modules, rank, shape.inputs, seed=seed),
        noise(*outputs, rank, seed=seed + 1),
        1 + noise(*outputs, seed=seed + 2) if affine else None,
        noise(*outputs, seed=seed + 3) if affine else None,
    )


class Sites:
    """`layers.changes.ExpertChanges`: slots for the products that it is asked for. up: of how many modules; 0: none."""

    def __init__(self, dtype: torch.dtype, device: torch.device, up: int, *, affine: bool, rank: int) -> None:
        self.dtype, self.device, self.affine, self.rank = dtype, device, affine, rank
        self.modules = [up, 1]
        self.current = CurrentRows()
        self.held: list[dict[int, ExpertFactors]] = []

    def experts(self, products: Any, shape: tuple[int, int]) -> ExpertSlots | None:
        modules = self.modules[len(self.held)]
        self.held.append({})
        if modules == 0:
            return None
        sizes = ExpertShape(num_experts=NUM, inputs=shape[1], outputs=shape[0], modules=modules)
        slots = ExpertSlots(sizes, SlotSizes(number=SLOTS, rank=self.rank), self.dtype, self.device, affine=self.affine)
        for slot, rank in enumerate((self.rank, 4, 0)):  # the last one is of no adapter, and was used before
            slots.write(slot, factors(sizes, self.rank, 90 + slot, affine=self.affine))
            given = factors(sizes, rank, 7 * slot + 20 * len(self.held), affine=self.affine) if rank else None
            slots.write(slot, given)
            if given is not None:
                self.held[-1][slot] = given
        return slots

    def slots_of(self, num_rows: int) -> Tensor | None:
        return None if self.current.rows is None else self.current.rows.among(num_rows).slots


def changed(given: ExpertFactors | None, expert: int, x: Tensor, out: Tensor) -> Tensor:
    if given is None:
        return out
    modules = given.a.shape[1]
    parts = given.b[expert].double().chunk(modules)
    out = out + torch.cat([b @ (given.a[expert, i].double() @ x) for i, b in enumerate(parts)])
    if given.gain is not None and given.shift is not None:
        out = out * given.gain[expert].double() + given.shift[expert].double()
    return out


def reference(
    experts: list[ExpertWeights], sites: Sites, numbers: list[int], hidden: Tensor, weights: Tensor, chosen: Tensor,
    activation: Any, on_input: bool,
) -> Tensor:  # fmt: skip
    result = torch.zeros(hidden.shape, dtype=torch.float64)
    for token, row in enumerate(hidden.double().cpu()):
        for weight, index in zip(weights[token].double().cpu(), chosen[token].tolist(), strict=True):
            e, (up_held, down_held) = experts[index], sites.held
            read = row * weight if on_input else row
            up = e.up.dequantize(torch.float64).cpu() @ read
            up = up if e.up_bias is None else up + e.up_bias.double().cpu()
            inner = activation(changed(up_held.get(numbers[token]), index, read, up)[None])[0]
            down = e.down.dequantize(torch.float64).cpu() @ inner
            down = down if e.down_bias is None else down + e.down_bias.double().cpu()
            down = changed(down_held.get(numbers[token]), index, inner, down)
            result[token] += down if on_input else weight * down
    return result


CASES: list[Any] = [
    # modules of up, rank, affine, tokens, dtype, on_input, silu, biased, quantized
    (1, 16, False, 7, torch.float32, False, True, True, False),
    (2, 8, True, 7, torch.float32, False, True, False, True),
    (2, 8, True, 7, torch.float32, False, False, True, False),
    (1, 16, False, 5, torch.float32, True, True, False, False),
    (1, 80, False, 20, torch.bfloat16, False, False, False, True),
    (2, 16, False, 20, torch.float16, False, True, True, False),
    (0, 16, False, 4, torch.float32, False, True, False, False),
]


@pytest.mark.parametrize(("up", "rank", "affine", "tokens", "dtype", "on_input", "silu", "biased", "quantized"), CASES)
def test_each_token_gets_what_its_own_adapter_adds(
    device: torch.device, up: int, rank: int, affine: bool, tokens: int, dtype: torch.dtype, on_input: bool,
    silu: bool, biased: bool, quantized: bool,
) -> None:  # fmt: skip
    def matrix(height: int, depth: int, seed: int) -> Any:
        if not quantized:
            return Plain(noise(height, depth, seed=seed).to(device, dtype))
        codes = torch.randint(0, 16, (height, depth), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
        scales = torch.full((height, depth // 8), 0.25 / depth**0.5, dtype=torch.float16)
        zeros = torch.full((height, depth // 8), 7, dtype=torch.uint8)
        return Codes.of(codes.to(device), scales.to(device), zeros.to(device), 8, 4)

    experts = [
        ExpertWeights(
            matrix(2 * SIZE, HIDDEN, 4 * e),
            matrix(HIDDEN, SIZE, 4 * e + 1),
            noise(2 * SIZE, seed=4 * e + 2).to(device, dtype) if biased else None,
            noise(HIDDEN, seed=4 * e + 3).to(device, dtype) if biased else None,
            PRODUCT,
            PRODUCT,
        )
        for e in range(NUM)
    ]
    sites: Any = Sites(dtype, device, up, affine=affine, rank=rank)
    activation = gated("silu") if silu else clamped_swiglu(1.7, 7.0)
    generator = torch.Generator().manual_seed(tokens)
    subject = TritonExperts(experts, activation, dtype, on_input=on_input, silu=silu, changes=sites)
    plain = TritonExperts(experts, activation, dtype, on_input=on_input, silu=silu)
    numbers = torch.randint(BASE, SLOTS, (tokens,), generator=generator).tolist()
    numbers[:4] = [0, BASE, 1, 2]
    x = noise(tokens, HIDDEN, seed=1).mul(3).to(device, dtype)
    chosen = torch.rand(tokens, NUM, generator=generator).topk(TOP_K).indices
    weights = torch.rand(tokens, TOP_K, generator=generator).to(device)
    base = subject(x, weights, chosen.to(device))
    assert torch.equal(base, plain(x, weights, chosen.to(device)))
    sites.current.rows = adapter_rows(np.array(numbers), None, device)
    wanted = reference(experts, sites, numbers, x, weights, chosen, activation, on_input)
    for tiles in (None, placement.tile_configs(dtype)[-1])[: 2 if up == 1 else 1]:
        actual = subject._run(x, weights, chosen.to(device), tiles, sites.slots_of(tokens))
        error = (actual.double().cpu() - wanted).norm() / wanted.norm()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)
        if tiles is None:
            of_base = torch.tensor([number in (BASE, 2) for number in numbers])
            assert torch.equal(actual[of_base], base[of_base]), "rows of the base model keep their bits"
            assert not torch.equal(actual[~of_base], base[~of_base])
