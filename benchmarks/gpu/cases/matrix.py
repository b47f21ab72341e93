"""S1, products: linear layers of few and many rows, the head, and experts, against float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.cases.tally import Tally, limit_of, poison_memory
from benchmarks.gpu.context import Context
from benchmarks.gpu.products import products_of
from model_server.layers.activation import gated
from model_server.layers.experts.choice import make_experts
from model_server.layers.experts.experts import ExpertWeights
from model_server.layers.linear.factory import LinearFactory
from model_server.quantization.forms import Plain

ROWS = (1, 2, 3, 7, 8, 16, 17, 32, 64, 100, 257)
# out, in: an 8B model's output matrix and gate-up, a vocabulary that no tile divides, a narrow one.
SIZES = ((4096, 4096), (28672, 4096), (128_257, 2048), (96, 80))
TINY_SIZES = ((96, 64), (321, 64))
# experts, chosen, hidden, intermediate: Qwen 3 MoE, Mixtral narrowed.
MIXTURES = ((128, 8, 2048, 768), (8, 2, 1024, 3584))
TINY_MIXTURES = ((8, 2, 32, 48),)
TOKENS = (1, 2, 9, 64, 300)


def run_products(context: Context) -> None:
    """`layers.linear`, with a bias and without."""
    tally = Tally(context, "linear layers")
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        linears = LinearFactory(context.device, dtype)
        for out, inner in TINY_SIZES if context.tiny else SIZES:
            weight = _random(context, out, inner, dtype)
            bias = _random(context, 1, out, dtype)[0]
            for rows in ROWS[:4] if context.tiny else ROWS:
                if not context.has_time(3):
                    tally.left_out(f"{rows}x{inner}x{out} {dtype}")
                    continue
                x = _random(context, rows, inner, dtype)
                for added in (None, bias):
                    poison_memory(context.device)
                    wanted = F.linear(x.double(), weight.double(), None if added is None else added.double())
                    name = f"{rows}x{inner}x{out} {dtype}"
                    made = linears.make(Plain(weight), added)
                    tally.compare(name, made(x), wanted, limit_of(dtype))
                    # What is chosen by time later: every form must be right.
                    for number, product in enumerate(products_of(made, rows)):
                        poison_memory(context.device)
                        tally.compare(f"{name} form {number}", product(x, weight, added), wanted, limit_of(dtype))
    tally.tell()


def run_experts(context: Context) -> None:
    """`layers.experts`: all tokens on the same few experts, none on some, and spread at random."""
    tally = Tally(context, "experts")
    activation = gated("silu")
    for dtype in (torch.bfloat16, torch.float32):
        for experts, top_k, hidden, size in TINY_MIXTURES if context.tiny else MIXTURES:
            weights = [
                ExpertWeights(
                    Plain(_random(context, 2 * size, hidden, dtype)), Plain(_random(context, hidden, size, dtype))
                )
                for _ in range(experts)
            ]
            run = make_experts(weights, len(weights), activation, LinearFactory(context.device, dtype))
            for tokens in TOKENS[:3] if context.tiny else TOKENS:
                for spread in ("random", "the same"):
                    name = f"{tokens} tokens on {spread} {top_k} of {experts} {dtype}"
                    if not context.has_time(4):
                        tally.left_out(name)
                        continue
                    chosen = _chosen(context, tokens, experts, top_k, spread == "random")
                    scores = torch.rand(tokens, top_k, device=context.device)
                    x = _random(context, tokens, hidden, dtype)
                    poison_memory(context.device)
                    # The sums inside are rounded to the type between the two products.
                    tally.compare(
                        name, run(x, scores, chosen), _expected(weights, x, scores, chosen), 2 * limit_of(dtype)
                    )
    tally.tell()


def _chosen(context: Context, tokens: int, experts: int, top_k: int, spread: bool) -> Tensor:
    if not spread:
        return torch.arange(top_k, device=context.device).expand(tokens, top_k).contiguous()
    return torch.rand(tokens, experts, device=context.device).topk(top_k, dim=1).indices


def _expected(weights: list[ExpertWeights], x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for index, expert in enumerate(weights):
        token, place = (chosen == index).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        gate, up = F.linear(x[token].double(), expert.up.dequantize(torch.float64)).chunk(2, dim=-1)
        given = F.linear(F.silu(gate) * up, expert.down.dequantize(torch.float64))
        result.index_add_(0, token, given * scores[token, place, None].double())
    return result


def _random(context: Context, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Entries such that a product of a row and a column is about 1."""
    return torch.randn(rows, columns, device=context.device).mul_(columns**-0.25).to(dtype)
