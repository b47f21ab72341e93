"""What is expected before a run, from the ceilings that S0 measured: printed beside what was then measured.

A decode step is its roofline time with each part at the share that such kernels usually reach, and one gap per kernel.
The constants are guesses made before any run on a card; a run that proves one wrong replaces it.
"""

from __future__ import annotations

from benchmarks.gpu.measuring import roofline
from benchmarks.gpu.measuring.roofline import Cost, Machine

# Of the copy bandwidth: weights streamed by the library's products; rows of the cache read by split attention.
STREAMED = 0.90
ATTENTION = 0.80
# Of the rate of a large square product: products of many rows; causal attention.
PRODUCTS = 0.85
PREFILL_ATTENTION = 0.50
# qkv; rotation and cache write; attention and its merge; output; add and norm, twice; gate-up; gated; down.
KERNELS_PER_LAYER = 10
# Embedding, first norm, head, draw and what moves the ids.
KERNELS_PER_STEP = 12


def decode_seconds(cost: Cost, machine: Machine, batch: int, context: int) -> float:
    """One step of `batch` rows inside a CUDA graph."""
    streamed = cost.read_bytes(batch) / machine.bandwidth / STREAMED
    multiplied = 2 * cost.active * batch / machine.flops / PRODUCTS
    attention = roofline.attention_seconds(cost, machine, batch, context) / ATTENTION
    return max(streamed, multiplied) + attention + kernels(cost) * machine.gap_s


def kernels(cost: Cost) -> int:
    """Kernels of one decode step."""
    return KERNELS_PER_LAYER * cost.layers + KERNELS_PER_STEP


def prefill_seconds(cost: Cost, machine: Machine, lengths: list[int]) -> float:
    """One forward over prompts of these lengths."""
    products = sum(lengths) * 2 * cost.active_layers / machine.flops
    attention = sum(2 * n * n * cost.query_width * cost.layers for n in lengths) / machine.flops
    streamed = cost.read_bytes(sum(lengths)) / machine.bandwidth
    return max(products / PRODUCTS, streamed / STREAMED) + attention / PREFILL_ATTENTION
