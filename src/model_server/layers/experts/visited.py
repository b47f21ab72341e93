"""Experts one after the other, for CPUs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from model_server.layers.activation import Activation
from model_server.layers.changes import ExpertChanges
from model_server.layers.experts.experts import ExpertWeights, combine, weighted_sums
from model_server.layers.linear.factory import LinearFactory
from model_server.layers.linear.linear import Linear
from model_server.weights.products import Product


class VisitedExperts:
    """Multiplies expert by expert, after asking the device which got tokens."""

    __slots__ = ("_activation", "_changes", "_layers", "_on_input")

    capturable = False

    def __init__(
        self,
        weights: Iterable[ExpertWeights],
        activation: Activation,
        linears: LinearFactory,
        *,
        on_input: bool,
        changes: ExpertChanges | None = None,
    ) -> None:
        self._changes = changes
        made: tuple[list[Linear], list[Linear]] = [], []
        products: tuple[list[Product | None], list[Product | None]] = [], []
        shapes = (0, 0), (0, 0)
        for w in weights:
            shapes = w.up.shape, w.down.shape
            parts = (w.up, w.up_bias, w.up_product), (w.down, w.down_bias, w.down_product)
            for place, (form, bias, product) in enumerate(parts):
                made[place].append(linears.make(form, bias))
                products[place].append(product)
        both = zip(made, products, shapes, strict=True)
        up, down = made if changes is None else [changes.visited(*one) for one in both]
        self._layers = list(zip(up, down, strict=True))
        self._activation = activation
        self._on_input = on_input

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        num_tokens, top_k = chosen.shape
        numbers = None if self._changes is None else self._changes.numbers_of(num_tokens)
        if num_tokens == 1:
            self._narrow(numbers)
            return self._single(hidden, weights, chosen[0].tolist())
        order = chosen.flatten().argsort()
        counts = chosen.flatten().bincount(minlength=len(self._layers)).tolist()
        tokens = order // top_k
        rows = hidden.index_select(0, tokens)
        if self._on_input:
            rows.mul_(weights.flatten()[order].unsqueeze(1).to(rows.dtype))
        if numbers is not None:
            numbers = numbers[tokens.to(numbers.device)]
        results = torch.empty_like(rows)
        start = 0
        for (up, down), count in zip(self._layers, counts, strict=True):
            if count:
                stop = start + count
                self._narrow(None if numbers is None else numbers[start:stop])
                results[start:stop] = down(self._activation(up(rows[start:stop])))
                start = stop
        return combine(results, order, None if self._on_input else weights, top_k)

    def _narrow(self, numbers: Tensor | None) -> None:
        if self._changes is not None:
            self._changes.narrow(numbers)

    def _single(self, hidden: Tensor, weights: Tensor, chosen: list[int]) -> Tensor:
        """Decode of one sequence: nothing to sort."""
        results = []
        for place, expert in enumerate(chosen):
            up, down = self._layers[expert]
            read = hidden * weights[:, place : place + 1].to(hidden.dtype) if self._on_input else hidden
            results.append(down(self._activation(up(read))))
        if len(results) == 1 and self._on_input:
            return results[0]
        return weighted_sums(torch.stack(results, dim=1), None if self._on_input else weights)
