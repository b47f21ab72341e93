"""S12: each product of few rows that could be chosen, timed beside the library's: the shapes of the 8B model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.measuring.timing import captured, measure
from benchmarks.gpu.products import products_of
from model_server.layers.linear.decode_gemm import BUCKETS
from model_server.layers.linear.factory import LinearFactory
from model_server.quantization.forms import Plain

# out, in: qkv, output, gate and up, down, head.
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
TINY_SHAPES = ((96, 64),)
# Copies of a matrix that are multiplied in turn, so that none is still in the GPU's cache.
MOST_COPY_BYTES = 512 * 2**20


def run(context: Context) -> None:
    """Share of the bandwidth that reading the matrix once would take."""
    dtype = torch.bfloat16 if context.on_cuda else torch.float32
    for out, depth in TINY_SHAPES if context.tiny else SHAPES:
        weight = torch.randn(out, depth, device=context.device).mul_(depth**-0.5).to(dtype)
        linear = LinearFactory(context.device, dtype).make(Plain(weight))
        copies = [weight] if context.tiny else [weight.clone() for _ in range(max(2, MOST_COPY_BYTES // weight.nbytes))]
        for rows in BUCKETS:
            x = torch.randn(rows, depth, device=context.device).to(dtype)
            for number, product in enumerate(products_of(linear, rows)):
                form = "the library's" if number == 0 else f"form {number}"
                _time(context, f"product {rows}x{depth}x{out}, {form}", partial(product, x, bias=None), copies)


def _time(context: Context, name: str, product: partial[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    if not context.has_time(2):
        context.skip(name, "no time left")
        return

    def work() -> None:
        for copy in copies:
            product(weight=copy)

    with torch.inference_mode():
        replay = captured(work, context.device, 1)
        timing = measure(replay, context.device, repeats=2 if context.tiny else 20)
    seconds = timing.seconds / len(copies)
    least = copies[0].nbytes / context.ceilings.bandwidth
    context.figure(name, seconds, "s", ratio=least / seconds, spread=timing.spread)
