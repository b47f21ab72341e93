"""Medusa heads: head k guesses the token k + 1 places behind the drawn one."""

# Version 1 has residual layers and a matrix each; version 2 one layer, and the model's matrix.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.layers.embedding import Head
from model_server.layers.linear.linear import Linear
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.vocabulary import head_over
from model_server.weights.matrix import Part


class Medusa:
    """Layers `x + silu(W x + b)` of each head, then its matrix."""

    def __init__(self, layers: list[list[Linear]], heads: list[Head]) -> None:
        self._layers = layers
        self._heads = heads

    def guess(self, hidden: Tensor, newest: Tensor, forced: Tensor | None, most: int) -> Tensor:
        found = []
        for layers, head in zip(self._layers[:most], self._heads, strict=False):
            x = hidden
            for layer in layers:
                x = x + F.silu(layer(x))
            found.append(head.likeliest(x))
        return torch.stack(found, dim=1)


def load_medusa(
    loader: Loader, number: int, num_layers: int, hidden_size: int, vocab_size: int, base_head: Head
) -> Medusa:
    """Load the first `number` heads; `num_layers` is version 1's."""
    has_own_heads = loader.has(f"0.{num_layers}.weight")
    num_layers = num_layers if has_own_heads else 1
    layers = [
        # Whole on each rank: they are small, and their results are needed whole.
        [
            loader.column_linear(
                [Part(f"{head}.{layer}.linear", ((0, hidden_size),), hidden_size)], hidden_size, as_stored=True
            )
            for layer in range(num_layers)
        ]
        for head in range(number)
    ]
    heads = [base_head] * number
    if has_own_heads:
        heads = [head_over(loader, f"{head}.{num_layers}", vocab_size, hidden_size) for head in range(number)]
    return Medusa(layers, heads)
