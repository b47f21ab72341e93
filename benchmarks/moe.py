"""What the experts of one layer cost at 1 to 512 tokens: `python -m benchmarks.moe [float32|bfloat16]`.

Each way to run them, in milliseconds of CPU time on one thread (the quickest of several runs, which other work on the
machine hardly changes): the one that a CPU serves with, the one for other devices, a loop over experts as transformers
writes it, and a batched product of copied weights. The expert tensors are far larger than the caches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.layers.activation import gated
from model_server.layers.experts.experts import ExpertWeights, stacked
from model_server.layers.experts.grouped import GroupedExperts
from model_server.layers.experts.visited import VisitedExperts
from model_server.layers.linear.factory import LinearFactory
from model_server.quantization.forms import Plain

# Experts, chosen per token, hidden size, intermediate size: Mixtral, DeepSeek V2 Lite and Qwen 3 MoE, each narrower.
SIZES = [(8, 2, 1024, 2048), (64, 6, 1024, 512), (128, 8, 1024, 384)]
TOKENS = (1, 8, 32, 512)
SECONDS = 0.5
# More copied weights than this many experts take minutes.
MOST_COPIES = 64
ACTIVATION = gated("silu")

Ways = dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]


def looped(weights: list[ExpertWeights], dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """As transformers' eager experts."""
    stacks = stacked(weights, len(weights), dtype)
    ups, downs = stacks.up, stacks.down

    def run(hidden: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(hidden)
        mask = F.one_hot(chosen, len(weights)).permute(2, 1, 0)
        for (index,) in (mask.sum(dim=(-1, -2)) > 0).nonzero().tolist():
            place, token = torch.where(mask[index])
            given = F.linear(ACTIVATION(F.linear(hidden[token], ups[index])), downs[index])
            result.index_add_(0, token, (given * scores[token, place, None]).to(hidden.dtype))
        return result

    return run


def gathered(weights: list[ExpertWeights], dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The chosen experts' weights copied together, one batched product."""
    stacks = stacked(weights, len(weights), dtype)
    up, down = stacks.up, stacks.down

    def run(hidden: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        rows = hidden.repeat_interleave(chosen.shape[1], 0).unsqueeze(-1)
        gate_up = torch.bmm(up.index_select(0, chosen.flatten()), rows).squeeze(-1)
        given = torch.bmm(down.index_select(0, chosen.flatten()), ACTIVATION(gate_up).unsqueeze(-1)).squeeze(-1)
        return torch.bmm(scores.to(hidden.dtype).unsqueeze(1), given.view(*chosen.shape, -1)).squeeze(1)

    return run


def milliseconds(run: Callable[[], Tensor]) -> float:
    """CPU time of the quickest of the runs that fit into SECONDS, at least three."""
    run()
    best, spent, count = float("inf"), 0.0, 0
    while spent < SECONDS or count < 3:
        start = time.process_time()
        run()
        took = time.process_time() - start
        best, spent, count = min(best, took), spent + took, count + 1
    return best * 1000


def main(dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    print(f"{dtype}; ms of CPU time per layer")
    for num_experts, top_k, hidden_size, size in SIZES:
        print(f"\n{num_experts} experts of {size}, {top_k} chosen, hidden size {hidden_size}")
        weights = [
            ExpertWeights(
                Plain(torch.randn(2 * size, hidden_size).mul_(0.02).to(dtype)),
                Plain(torch.randn(hidden_size, size).mul_(0.02).to(dtype)),
            )
            for _ in range(num_experts)
        ]
        ways: Ways = {
            "visited": VisitedExperts(weights, ACTIVATION, LinearFactory(torch.device("cpu"), dtype), on_input=False),
            "grouped": GroupedExperts(weights, len(weights), ACTIVATION, dtype, on_input=False),
            "looped": looped(weights, dtype),
            "gathered": gathered(weights, dtype),
        }
        print(f"{'tokens':>8}" + "".join(f"{name:>10}" for name in ways))
        for count in TOKENS:
            hidden = torch.randn(count, hidden_size).to(dtype)
            chosen = torch.rand(count, num_experts).topk(top_k).indices
            scores = torch.rand(count, top_k)
            row = f"{count:>8}"
            for name, way in ways.items():
                if name == "gathered" and count * top_k > MOST_COPIES:
                    row += f"{'-':>10}"
                else:
                    row += f"{milliseconds(partial(way, hidden, scores, chosen)):>10.2f}"
            print(row, flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main(getattr(torch, sys.argv[1] if len(sys.argv) > 1 else "float32"))
