"""The experts of one layer: every token is read by a few of many MLPs. What every way to run them takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_server.quantization.forms import Form


class Experts(Protocol):
    """The experts of one layer on this rank."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold them: they ask the device for nothing."""

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """hidden [n, hidden], weights [n, top_k] float32, chosen experts [n, top_k] int64 -> sums [n, hidden]."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert's part on this rank.

    up: [2 * n, hidden] if gated, gate first; down: [hidden, n]. Biases: all experts of a layer have one, or none.
    """

    up: Form
    down: Form
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def stacked(weights: Sequence[ExpertWeights], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of all experts: up [experts, out, in], down [experts, out, in], in `dtype`."""
    up = torch.stack([w.up.dequantize(dtype) for w in weights])
    return up, torch.stack([w.down.dequantize(dtype) for w in weights])


def stacked_biases(weights: Sequence[ExpertWeights]) -> tuple[Tensor | None, Tensor | None]:
    """Of all experts: up [experts, out], down [experts, out]."""
    up, down = (
        None if biases[0] is None else torch.stack([b for b in biases if b is not None])
        for biases in ([w.up_bias for w in weights], [w.down_bias for w in weights])
    )
    return up, down


def combine(results: Tensor, order: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    """Sums per token of `results` [n * top_k, hidden], which stand in `order`; weights [n, top_k], None: ones."""
    restored = torch.empty_like(results).index_copy_(0, order, results)
    if top_k == 1 and weights is None:
        return restored
    restored = restored.view(-1, top_k, results.shape[1])
    if weights is None:
        return restored.sum(dim=1)
    return torch.bmm(weights.to(restored.dtype).unsqueeze(1), restored).squeeze(1)
