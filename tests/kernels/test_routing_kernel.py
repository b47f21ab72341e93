"""Routing of experts by one kernel, in Triton's interpreter, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.triton_interpreter import mend

from model_server.layers.fused.triton import TritonFused
from model_server.layers.routing import Routing, choose

mend()

ROUTINGS = {
    "mixtral": Routing(num_experts=8, top_k=2, norm=1.0),
    "qwen2_moe": Routing(num_experts=60, top_k=4),
    "gpt_oss": Routing(num_experts=32, top_k=4, norm=1.0),
    "dbrx": Routing(num_experts=16, top_k=4, norm=2.0),
    "llama4": Routing(num_experts=16, top_k=1, score="sigmoid", on_input=True),
    "deepseek_v2": Routing(num_experts=160, top_k=6, num_groups=8, top_groups=3, scaling=16.0),
    "deepseek_v3": Routing(
        num_experts=64, top_k=8, score="sigmoid", num_groups=8, top_groups=4, group_score="best_two", norm=1.0,
        scaling=2.5,
    ),
    "glm4_moe": Routing(num_experts=128, top_k=8, score="sigmoid", norm=1.0),
    "one expert": Routing(num_experts=1, top_k=1),
    "all experts": Routing(num_experts=6, top_k=6, norm=1.0),
    "sparse_mixer": Routing(num_experts=8, top_k=2, score="sparse_mixer"),
    "another norm": Routing(num_experts=8, top_k=3, norm=3.0),
}  # fmt: skip


def by_expert(routed: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Weights and experts in the order of the experts: which is written first is no part of the rule."""
    weights, chosen = routed[0].cpu(), routed[1].cpu()
    order = chosen.argsort(dim=-1)
    return weights.gather(-1, order), chosen.gather(-1, order)


@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "corrected"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_the_kernel_chooses_as_plain_torch_does(device: torch.device, name: str, corrected: bool) -> None:
    routing = ROUTINGS[name]
    seeds = torch.Generator().manual_seed(len(name))
    logits = torch.randn(7, routing.num_experts, generator=seeds).mul(3).to(device)
    correction = torch.randn(routing.num_experts, generator=seeds).to(device) if corrected else None
    weights, chosen = by_expert(TritonFused(device).route(routing, correction)(logits))
    wanted_weights, wanted = by_expert(choose(logits, routing, correction))
    assert weights.dtype == torch.float32 and chosen.dtype == torch.int64
    assert torch.equal(chosen, wanted)
    torch.testing.assert_close(weights, wanted_weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_logits_of_two_bytes(device: torch.device, dtype: torch.dtype) -> None:
    """Equal logits are common in these types: what counts is that the best scores are taken, each once."""
    routing = replace(ROUTINGS["mixtral"], num_experts=40, top_k=8, norm=None)
    logits = torch.randn(20, 40, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    weights, chosen = TritonFused(device).route(routing, None)(logits)
    wanted, _ = choose(logits, routing, None)
    torch.testing.assert_close(weights.sort(dim=-1).values, wanted.sort(dim=-1).values)
    assert all(len(set(row)) == 8 for row in chosen.tolist())


def test_large_sigmoids_are_still_told_apart(device: torch.device) -> None:
    """In float32 both are 1."""
    routing = Routing(num_experts=3, top_k=1, score="sigmoid")
    weights, chosen = TritonFused(device).route(routing, None)(torch.tensor([[40.0, 50.0, 45.0]], device=device))
    assert chosen.tolist() == [[1]] and weights.tolist() == [[1.0]]


def test_no_rows(device: torch.device) -> None:
    weights, chosen = TritonFused(device).route(ROUTINGS["mixtral"], None)(torch.empty(0, 8, device=device))
    assert weights.shape == chosen.shape == (0, 2)


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_logits_that_are_no_numbers_choose_experts_that_exist(device: torch.device, name: str) -> None:
    """The rows beside them are right, and their own weights say what happened."""
    routing = ROUTINGS[name]
    logits = torch.randn(3, routing.num_experts, generator=torch.Generator().manual_seed(2)).to(device)
    logits[1] = torch.nan
    weights, chosen = TritonFused(device).route(routing, None)(logits)
    assert chosen.min() >= 0 and chosen.max() < routing.num_experts
    assert weights[1].isnan().all() and not weights[[0, 2]].isnan().any()
