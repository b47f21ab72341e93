"""From router logits to experts and weights, as `layers.routing.choose`, in one kernel.

A program holds a token's experts as [groups, experts of a group] and takes the best `top_k` times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def route(
    logits: Tensor,
    correction: Tensor | None,
    *,
    top_k: int,
    softmax: bool,
    num_groups: int,
    top_groups: int,
    best_two: bool,
    norm: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Choose each row's best `top_k` experts: weights [n, top_k] float32 and experts [n, top_k] int64, best first.

    Equal scores choose the lower number.

    Args:
        logits: [n, num_experts], floating.
        correction: [num_experts] float32 or None.
        norm: The p-norm that divides the weights, or 0; the rest as in `layers.routing.Routing`.
    """
    num_rows, num_experts = logits.shape
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num_rows, top_k, dtype=torch.int64, device=logits.device)
    if num_rows > 0:
        logits = logits.contiguous()
        _route[(num_rows,)](
            logits, logits if correction is None else correction, weights, chosen, scaling,
            NUM_EXPERTS=num_experts, NUM_GROUPS=num_groups, TOP_GROUPS=top_groups, TOP_K=top_k, SOFTMAX=softmax,
            CORRECTED=correction is not None, BEST_TWO=best_two, NORM=norm, **_sizes(num_experts, num_groups, top_k),
        )  # fmt: skip
    return weights, chosen


def _sizes(num_experts: int, num_groups: int, top_k: int) -> dict[str, int]:
    groups, size = triton.next_power_of_2(num_groups), triton.next_power_of_2(num_experts // num_groups)
    # One warp needs no barrier between its rounds; beyond 512 numbers its registers would not hold them.
    return {
        "GROUPS": groups,
        "GROUP_SIZE": size,
        "PLACES": triton.next_power_of_2(top_k),
        "num_warps": 1 if groups * size <= 512 else 4,
    }


@triton.jit
def _route(
    logits, correction, weights, chosen, scaling,
    NUM_EXPERTS: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    SOFTMAX: tl.constexpr, CORRECTED: tl.constexpr, BEST_TWO: tl.constexpr, NORM: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    WITHIN: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, GROUP_SIZE)
    number = group[:, None] * WITHIN + member[None, :]
    exists = (group < NUM_GROUPS)[:, None] & (member < WITHIN)[None, :]
    logit = tl.load(logits + row * NUM_EXPERTS + number, mask=exists, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        score = tl.exp(logit - tl.max(tl.max(logit, axis=1), axis=0))
        score = score / tl.sum(tl.sum(score, axis=1), axis=0)
    else:
        score = 1.0 / (1.0 + tl.exp(-logit))
    # A sigmoid of a large logit is 1, whatever the logit: without a correction the logits themselves decide.
    choice = logit
    if CORRECTED:
        choice = score + tl.load(correction + number, mask=exists, other=0.0)
        choice = tl.where(exists, choice, float("-inf"))
    if TOP_GROUPS < NUM_GROUPS:
        if not CORRECTED:
            choice = tl.where(exists, score, float("-inf"))
        rest = tl.max(choice, axis=1)
        if BEST_TWO:
            first = tl.min(tl.where(choice == rest[:, None], member[None, :], GROUP_SIZE), axis=1)
            second = tl.max(tl.where(member[None, :] == first[:, None], float("-inf"), choice), axis=1)
            rest = tl.where(group < NUM_GROUPS, rest + second, float("-inf"))
        is_open = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            best_group = tl.min(tl.where(rest == tl.max(rest, axis=0), group, GROUPS), axis=0)
            is_open = is_open | (group == best_group)
            rest = tl.where(group == best_group, float("-inf"), rest)
        choice = tl.where(is_open[:, None], choice, float("-inf"))
    place = tl.arange(0, PLACES)
    expert = tl.zeros([PLACES], tl.int32)
    weight = tl.zeros([PLACES], tl.float32)
    for index in tl.static_range(TOP_K):
        best = tl.max(tl.max(choice, axis=1), axis=0)
        found = tl.min(tl.min(tl.where((choice == best) & exists, number, NUM_EXPERTS), axis=1), axis=0)
        # NaN equals nothing: an expert that exists, with a weight that is NaN too.
        found = tl.minimum(found, NUM_EXPERTS - 1)
        is_found = (number == found) & exists
        expert = tl.where(place == index, found, expert)
        weight = tl.where(place == index, tl.sum(tl.sum(tl.where(is_found, score, 0.0), axis=1), axis=0), weight)
        choice = tl.where(is_found, float("-inf"), choice)
    if NORM == 1:
        weight = weight / (tl.sum(tl.abs(weight), axis=0) + 1e-20)
    if NORM == 2:
        weight = weight / (tl.sqrt(tl.sum(weight * weight, axis=0)) + 1e-20)
    tl.store(weights + row * TOP_K + place, weight * scaling, mask=place < TOP_K)
    tl.store(chosen + row * TOP_K + place, expert.to(tl.int64), mask=place < TOP_K)
