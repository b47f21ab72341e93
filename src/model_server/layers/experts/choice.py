"""Chooses the fastest way to run the experts of one layer, by device."""

# Tokens are sorted by expert, so that every expert multiplies its tokens at once. Measured by `benchmarks.moe` on a CPU
# with AVX-512 (8, 64 and 128 experts, 1 to 512 tokens): copying the chosen weights together for a batched product takes
# 4 to 75 times as long as visiting the experts where they are. Visits with packed matrices (`layers.linear`) are faster
# than a grouped product, 1.1 to 2.4 times in bfloat16 and up to 1.8 times in float32, but have to ask the device who
# got tokens. So there are several classes; on GPUs that can run them, kernels of our own.

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F

from model_server.kernels.availability import usable
from model_server.layers.activation import Activation
from model_server.layers.changes import ExpertChanges
from model_server.layers.experts.experts import Experts, ExpertWeights
from model_server.layers.experts.grouped import GroupedExperts
from model_server.layers.experts.visited import VisitedExperts
from model_server.layers.linear.factory import LinearFactory


def make_experts(
    weights: Iterable[ExpertWeights],
    num_experts: int,
    activation: Activation,
    linears: LinearFactory,
    *,
    on_input: bool = False,
    silu: bool = False,
    changes: ExpertChanges | None = None,
) -> Experts:
    """Make the experts of one layer.

    Args:
        weights: Of all; a generator is read one by one.
        on_input: See `Routing`.
        silu: `activation` is silu(gate) * up, which kernels can include.
        changes: Of their products, if some rows may have any.
    """
    device, dtype = linears.device, linears.dtype
    if device.type != "cpu" and usable(device):
        from model_server.layers.experts.triton import TritonExperts

        return TritonExperts(list(weights), activation, dtype, on_input=on_input, silu=silu, changes=changes)
    if device.type == "cpu" or not hasattr(F, "grouped_mm") or changes is not None:
        return VisitedExperts(weights, activation, linears, on_input=on_input, changes=changes)
    return GroupedExperts(weights, num_experts, activation, dtype, on_input=on_input)
