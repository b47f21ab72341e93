"""Causal convolutions of each channel, over a step's inputs and cached ones."""

from __future__ import annotations

import torch
from torch import Tensor

from model_server.recurrence.segments import ConvolutionPlan, Segments


def convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, previous: Tensor, sources: tuple[Tensor, ...] | None
) -> Tensor:
    """Sum each token's inputs in one order, however prompts are cut.

    Args:
        inputs: [num_tokens, channels].
        weight: [width, channels] float32, the token's own last.
        bias: [channels] float32, or None.
        previous: [num_segments, width - 1, channels], the nearest first.
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
    """Convolve with cached inputs, and cache the newest.

    Args:
        rows: [num_rows, channels], the layer's cache.
        plan: Which rows are read and written.

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


class TorchShortConvolution:
    """A `ShortConvolution`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, projected: Tensor, segments: Segments, plan: ConvolutionPlan, rows: Tensor) -> Tensor:
        inputs, gate, values = projected.chunk(3, dim=1)
        return convolve_cached(inputs * values, self._weight, self._bias, rows, plan).mul_(gate).to(projected.dtype)
