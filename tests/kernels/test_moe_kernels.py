"""Experts by kernels, in Triton's interpreter, against a loop over tokens in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

pytest.importorskip("triton")

from support.triton_interpreter import mend

from model_server.kernels.moe import placement
from model_server.layers.activation import clamped_swiglu, gated
from model_server.layers.experts.experts import ExpertWeights
from model_server.layers.experts.triton import TritonExperts
from model_server.quantization.forms import Form, Plain
from model_server.quantization.forms.codes import E2M1, Codes, Order
from model_server.quantization.forms.float8 import Fp8, quantize_rows
from model_server.quantization.forms.table import FP4, NF4, TableCodes

mend()

KINDS = ("codes4", "codes8")
STORED = (*KINDS, "float4", "nvfp4", "mxfp4", "table4", "float8", "block")


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def experts_of(
    num: int, hidden: int, size: int, dtype: torch.dtype, device: torch.device, biased: bool
) -> list[ExpertWeights]:
    def tensor(*shape: int, seed: int) -> Tensor:
        return noise(*shape, seed=seed).div(shape[-1] ** 0.5).to(device, dtype)

    return [
        ExpertWeights(
            Plain(tensor(2 * size, hidden, seed=4 * e)),
            Plain(tensor(hidden, size, seed=4 * e + 1)),
            tensor(2 * size, seed=4 * e + 2) if biased else None,
            tensor(hidden, seed=4 * e + 3) if biased else None,
        )
        for e in range(num)
    ]


def reference(experts: list[ExpertWeights], hidden: Tensor, weights: Tensor, chosen: Tensor, on_input: bool) -> Tensor:
    result = torch.zeros(hidden.shape, dtype=torch.float64)
    for token, row in enumerate(hidden.double().cpu()):
        for weight, index in zip(weights[token].double().cpu(), chosen[token].tolist(), strict=True):
            expert = experts[index]
            up = expert.up.dequantize(torch.float64).cpu() @ (row * weight if on_input else row)
            if expert.up_bias is not None:
                up += expert.up_bias.double().cpu()
            gate, linear = up.chunk(2)
            down = expert.down.dequantize(torch.float64).cpu() @ (silu(gate) * linear)
            if expert.down_bias is not None:
                down += expert.down_bias.double().cpu()
            result[token] += down if on_input else weight * down
    return result


@pytest.mark.parametrize("fused", [True, False], ids=["silu", "activation"])
@pytest.mark.parametrize(
    ("num", "top_k", "tokens", "hidden", "size", "dtype", "biased", "on_input"),
    [
        (4, 1, 1, 32, 16, torch.float32, False, False),
        (4, 2, 7, 40, 24, torch.float32, True, False),
        (6, 2, 50, 33, 17, torch.float32, False, True),
        (3, 1, 5, 64, 32, torch.bfloat16, False, True),
        (128, 8, 3, 32, 16, torch.float32, False, False),
        (8, 8, 40, 136, 72, torch.float16, True, False),
        (2, 1, 90, 64, 64, torch.bfloat16, False, False),
        (1, 1, 3, 16, 16, torch.float32, False, False),
    ],
)
def test_experts_equal_a_loop(
    device: torch.device, num: int, top_k: int, tokens: int, hidden: int, size: int, dtype: torch.dtype,
    biased: bool, on_input: bool, fused: bool,
) -> None:  # fmt: skip
    experts = experts_of(num, hidden, size, dtype, device, biased)
    x = noise(tokens, hidden, seed=1).to(device, dtype)
    before = x.clone()
    # Where there are enough, expert 0 gets no token.
    first = int(num > top_k)
    generator = torch.Generator().manual_seed(2)
    chosen = first + torch.rand(tokens, num - first, generator=generator).topk(top_k).indices
    weights = torch.rand(tokens, top_k, generator=generator).to(device)
    subject = TritonExperts(experts, gated("silu"), dtype, on_input=on_input, silu=fused)
    actual = subject(x, weights, chosen.to(device))
    wanted = reference(experts, x, weights, chosen, on_input)
    error = (actual.double().cpu() - wanted).norm() / wanted.norm()
    # The interpreter cuts a bfloat16 off where a card rounds it.
    half = 2e-2 if device.type == "cpu" else 1e-2
    assert error < (1e-5 if dtype == torch.float32 else half)
    assert actual.dtype == dtype
    assert torch.equal(x, before)


def quantized(form: Plain, kind: str) -> Form:
    """The nearest matrix of small whole numbers or 8-bit floats."""
    out, columns = form.shape
    if kind in ("float8", "block"):
        rows = quantize_rows(form.weight, form.weight.abs().amax(1).float())
        scales = rows.scales.repeat_interleave(-(-columns // 16), 1) * torch.rand(1, -(-columns // 16)).to(rows.scales)
        return rows if kind == "float8" else Fp8(rows.weight, scales, (1, 16))
    if kind == "float4":
        found = quantized(form, "codes4")
        assert isinstance(found, Codes)
        scales = found.scales.float() / 2
        return replace(found, scales=scales, zeros=torch.full_like(found.zeros, E2M1[0]), levels=E2M1)
    if kind == "table4":  # of which matrices may have several
        found = quantized(form, "codes4")
        assert isinstance(found, Codes)
        table = torch.tensor(NF4 if out % 3 else FP4, device=found.codes.device)
        return TableCodes(found.codes, 8 * found.scales.float(), table, 16, columns)
    if kind in ("nvfp4", "mxfp4"):
        found = quantized(form, "float4")
        assert isinstance(found, Codes)
        if kind == "mxfp4":
            return replace(found, scales=torch.exp2(found.scales.log2().round()))
        factors = found.scales.amax(1) / 448
        numbers = (found.scales / factors[:, None]).to(torch.float8_e4m3fn).float()
        return replace(found, scales=numbers * factors[:, None], factors=factors)
    bits, group = (4, 16) if kind == "codes4" else (8, columns)
    groups = -(-columns // group)
    codes = form.weight.float().mul(columns**0.5 * 2 ** (bits - 3)).add(2 ** (bits - 1)).round()
    zeros = torch.full((out, groups), 2 ** (bits - 1) - 1, dtype=torch.uint8, device=codes.device)
    scales = torch.rand(out, groups, generator=torch.Generator().manual_seed(out)).add(0.5).to(codes.device)
    scales = (scales / (columns**0.5 * 2 ** (bits - 3))).half()
    return Codes.of(codes.clamp(0, 2**bits - 1).to(torch.uint8), scales, zeros, group, bits)


@pytest.mark.parametrize("fused", [True, False], ids=["silu", "activation"])
@pytest.mark.parametrize(
    "kind", ["codes4", "codes8", "float4", "nvfp4", "mxfp4", "table4", "float8", "block", "ordered"]
)
@pytest.mark.parametrize(("tokens", "dtype"), [(3, torch.bfloat16), (40, torch.bfloat16), (9, torch.float32)])
def test_quantized_experts(device: torch.device, kind: str, tokens: int, dtype: torch.dtype, fused: bool) -> None:
    """Kept as they are stored; matrices in an order of columns, which differs from expert to expert, are made dense."""
    ordered = kind == "ordered"
    experts = []
    for expert in experts_of(4, 72, 40, torch.float32, device, True):
        up, down = (quantized(form, "codes4" if ordered else kind) for form in (expert.up, expert.down))
        if ordered:
            assert isinstance(up, Codes)
            up = replace(up, order=Order(torch.randperm(72).int().to(device), 72))
        biases = [None if bias is None else bias.to(dtype) for bias in (expert.up_bias, expert.down_bias)]
        experts.append(ExpertWeights(up, down, *biases))
    generator = torch.Generator().manual_seed(2)
    x = noise(tokens, 72, seed=1).to(device, dtype)
    chosen = torch.rand(tokens, 4, generator=generator).topk(2).indices
    weights = torch.rand(tokens, 2, generator=generator).to(device)
    subject = TritonExperts(experts, gated("silu"), dtype, on_input=False, silu=fused)
    assert (subject._up.kind == "plain") == ordered
    assert kind not in ("float4", "nvfp4", "mxfp4", "table4") or subject._up.kind == kind
    wanted = reference(experts, x, weights, chosen, False)
    actual = subject(x, weights, chosen.to(device))
    assert (actual.double().cpu() - wanted).norm() / wanted.norm() < (1e-5 if dtype == torch.float32 else 2e-2)


def test_experts_kept_in_several_ways(device: torch.device) -> None:
    experts = experts_of(2, 32, 16, torch.bfloat16, device, False)
    mixed = [
        replace(e, up=quantized(Plain(e.up.dequantize(torch.float32)), k)) for e, k in zip(experts, KINDS, strict=True)
    ]
    assert TritonExperts(mixed, gated("silu"), torch.bfloat16, on_input=False)._up.kind == "plain"


def test_experts_whose_scales_fit_8_bits_in_several_ways(device: torch.device) -> None:
    """They take more bits then, and are decoded all the same."""
    experts = [
        replace(e, up=quantized(Plain(e.up.dequantize(torch.float32)), kind))
        for e, kind in zip(experts_of(2, 32, 16, torch.bfloat16, device, False), ("nvfp4", "mxfp4"), strict=True)
    ]
    assert TritonExperts(experts, gated("silu"), torch.bfloat16, on_input=False)._up.kind == "float4"


def test_another_activation(device: torch.device) -> None:
    """GPT-OSS's, which the product does not take in."""
    experts = experts_of(3, 16, 16, torch.float32, device, True)
    x, chosen, weights = noise(2, 16, seed=1).to(device), torch.tensor([[0, 2], [2, 1]]), torch.rand(2, 2)
    activation = clamped_swiglu(1.7, 7.0)
    actual = TritonExperts(experts, activation, torch.float32, on_input=False)(x, weights.to(device), chosen.to(device))
    for token in range(2):
        wanted = torch.zeros(16, device=device)
        for weight, index in zip(weights[token].tolist(), chosen[token].tolist(), strict=True):
            e = experts[index]
            assert e.up_bias is not None and e.down_bias is not None
            up, down = (form.dequantize(torch.float32) for form in (e.up, e.down))
            wanted += weight * (down @ activation(up @ x[token] + e.up_bias) + e.down_bias)
        torch.testing.assert_close(actual[token], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_all_tiles(device: torch.device, dtype: torch.dtype) -> None:
    """A token's result, whatever tiles its number of neighbours would choose."""
    experts = experts_of(2, 48, 32, dtype, device, True)
    subject = TritonExperts(experts, gated("silu"), dtype, on_input=False, silu=True)
    x, chosen = noise(3, 48, seed=1).to(device, dtype), torch.tensor([[0, 1], [1, 0], [1, 0]])
    weights = torch.rand(3, 2, generator=torch.Generator().manual_seed(5)).to(device)
    wanted = reference(experts, x, weights, chosen, False)
    for tiles in placement.tile_configs(dtype):
        actual = subject._run(x, weights, chosen.to(device), tiles)
        error = (actual.double().cpu() - wanted).norm() / wanted.norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)


def test_no_tokens(device: torch.device) -> None:
    experts = experts_of(2, 16, 16, torch.float32, device, False)
    empty = torch.empty(0, 16, device=device)
    chosen = torch.empty(0, 2, dtype=torch.int64, device=device)
    assert TritonExperts(experts, gated("silu"), torch.float32, on_input=False)(
        empty, torch.empty(0, 2), chosen
    ).shape == (0, 16)


@pytest.mark.parametrize(
    ("num", "top_k", "tokens"),
    [(5, 2, 40), (128, 8, 2), (60, 4, 300), (1, 1, 17), (4, 1, 1), (128, 8, 513), (3, 2, 9000), (1, 1, 4097)],
)
def test_every_slot_is_placed_once(device: torch.device, num: int, top_k: int, tokens: int) -> None:
    chosen = torch.rand(tokens, num, generator=torch.Generator().manual_seed(3)).topk(top_k).indices.to(device)
    placed = placement.place(chosen, num, placement.tiles_for(chosen.numel(), num, placement.TILES))
    slots = placed.slots.view(-1, placed.tiles.rows).cpu()
    seen: list[int] = []
    for expert, row in zip(placed.experts.tolist(), slots.tolist(), strict=True):
        if expert < 0:
            continue
        kept = [slot for slot in row if slot < chosen.numel()]
        assert kept and kept == sorted(kept)
        assert (chosen.flatten()[kept] == expert).all()
        seen += kept
    assert sorted(seen) == list(range(chosen.numel()))
    used = [expert for expert in placed.experts.tolist() if expert >= 0]
    assert used == sorted(used)


def test_float32_rows_do_not_depend_on_their_number(device: torch.device) -> None:
    """A token's result is the same bits alone and among many: tiles of another height sum in the same order."""
    experts = experts_of(2, 96, 32, torch.float32, device, False)
    subject = TritonExperts(experts, gated("silu"), torch.float32, on_input=False, silu=True)
    x = noise(70, 96, seed=1).to(device)
    chosen = (torch.arange(70)[:, None] % 2).to(device)
    weights = torch.rand(70, 1).to(device)
    together = subject(x, weights, chosen)
    assert len({placement.tiles_for(n, 2, placement.FLOAT32_TILES) for n in (70, 1)}) == 2
    if device.type == "cpu":  # the interpreter's products are numpy's, which choose by shape
        torch.testing.assert_close(subject(x[:1], weights[:1], chosen[:1]), together[:1])
    else:
        assert torch.equal(subject(x[:1], weights[:1], chosen[:1]), together[:1])
