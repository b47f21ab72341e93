"""The interface of every way to run a layer's experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_server.quantization.forms import Form
from model_server.weights.products import Product


class Experts(Protocol):
    """The experts of one layer on this rank."""

    @property
    def capturable(self) -> bool:
        """Whether CUDA graphs can hold them: they ask the device for nothing."""

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sum the chosen experts [n, top_k] of hidden [n, hidden] by weights [n, top_k] float32."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert's part on this rank; all experts of a layer have biases, or none."""

    # [2 * n, hidden] if gated, gate first; down: [hidden, n].
    up: Form
    down: Form
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    # What `up` is of the stored matrices, for changes; None: there are none.
    up_product: Product | None = None
    down_product: Product | None = None


@dataclass(frozen=True, slots=True)
class StackedWeights:
    """All experts' up and down [experts, out, in], and biases [experts, out]."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None


def stacked(weights: Iterable[ExpertWeights], num_experts: int, dtype: torch.dtype) -> StackedWeights:
    """Stack in `dtype`, reading each expert straight into its place."""
    stacks: dict[str, Tensor] = {}
    for number, expert in enumerate(weights):
        found = {
            "up": expert.up.dequantize(dtype),
            "down": expert.down.dequantize(dtype),
            "up_bias": expert.up_bias,
            "down_bias": expert.down_bias,
        }
        for name, tensor in found.items():
            if tensor is not None:
                if number == 0:
                    stacks[name] = tensor.new_empty(num_experts, *tensor.shape)
                stacks[name][number] = tensor
    return StackedWeights(stacks["up"], stacks["down"], stacks.get("up_bias"), stacks.get("down_bias"))


def stacked_biases(weights: Sequence[ExpertWeights]) -> tuple[Tensor | None, Tensor | None]:
    """Stack biases: up and down [experts, out]."""
    up, down = (
        None if biases[0] is None else torch.stack([b for b in biases if b is not None])
        for biases in ([w.up_bias for w in weights], [w.down_bias for w in weights])
    )
    return up, down


def combine(results: Tensor, order: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    """Sum `results` [n * top_k, hidden], which are in `order`, by token and weights [n, top_k]."""
    restored = torch.empty_like(results).index_copy_(0, order, results)
    if top_k == 1 and weights is None:
        return restored
    return weighted_sums(restored.view(-1, top_k, results.shape[1]), weights)


def weighted_sums(results: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sums [n, hidden] of `results` [n, top_k, hidden]; weights [n, top_k], None: ones."""
    if weights is None:
        return results.sum(dim=1)
    return torch.bmm(weights.to(results.dtype).unsqueeze(1), results).squeeze(1)
