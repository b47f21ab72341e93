"""A causal convolution of each channel by itself, over the inputs of a step and those that the cache keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from model_server.recurrence.segments import ConvolutionPlan


def convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, previous: Tensor, sources: tuple[Tensor, ...] | None
) -> Tensor:
    """Each token's sum of its own input and those before it, weighted.

    Sums are taken in one order for every token, so that the result does not depend on how prompts are cut.

    Args:
        inputs: [num_tokens, channels].
        weight: [width, channels] float32, that of the token itself last.
        bias: [channels] float32; None: there is none.
        previous: [num_segments, width - 1, channels], the inputs before each segment, the nearest first.
        sources: As `ConvolutionPlan.sources`.

    Returns:
        [num_tokens, channels] float32.
    """
    width = len(weight)
    total = inputs * weight[-1]
    if sources is None:
        for lag in range(1, width):
            total.add_(previous[:, lag - 1] * weight[-1 - lag])
    else:
        every = torch.cat((inputs, previous.flatten(0, 1)))
        for lag, source in enumerate(sources, 1):
            total.add_(every.index_select(0, source) * weight[-1 - lag])
    return total if bias is None else total.add_(bias)


def convolve_cached(inputs: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, plan: ConvolutionPlan) -> Tensor:
    """As `convolve`, where the inputs before each segment are in the cache, into which the newest ones go.

    Args:
        inputs, weight, bias: As there.
        rows: [num_rows, channels], the layer's cache.
        plan: Which of its rows are read and written.

    Returns:
        [num_tokens, channels] float32.
    """
    width, channels = weight.shape
    if plan.writes_first:
        rows.index_copy_(0, plan.written, inputs)
    previous = rows.index_select(0, plan.previous.view(-1)).view(-1, width - 1, channels)
    # What is there instead is not of this sequence, and may be anything.
    previous = previous.masked_fill_(plan.missing, 0.0)
    if not plan.writes_first:
        rows.index_copy_(0, plan.written, inputs)
    return convolve(inputs, weight, bias, previous, plan.sources)
