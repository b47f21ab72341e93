"""Experts one after the other, for CPUs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from model_server.layers.activation import Activation
from model_server.layers.adapter_sites import AdapterSites
from model_server.layers.experts.experts import ExpertWeights, combine, slotted, weighted_sums
from model_server.layers.linear.factory import LinearFactory
from model_server.layers.linear.linear import Linear
from model_server.quantization.forms import Form
from model_server.weights.products import Product


class VisitedExperts:
    """Multiplies expert by expert, after asking the device which got tokens."""

    __slots__ = ("_activation", "_adapters", "_layers", "_on_input")

    capturable = False

    def __init__(
        self,
        weights: Iterable[ExpertWeights],
        activation: Activation,
        linears: LinearFactory,
        *,
        on_input: bool,
        adapters: AdapterSites | None = None,
    ) -> None:
        self._adapters = adapters

        has_slots = adapters is not None and adapters.slots is not None

        def make(form: Form, bias: Tensor | None, product: Product | None) -> Linear:
            linear = linears.make(form, bias)
            return linear if adapters is None or has_slots or product is None else adapters.linear(linear, product)

        self._layers: list[tuple[Linear, Linear]] = []
        products: list[tuple[Product | None, Product | None]] = []
        shapes = (0, 0), (0, 0)
        for w in weights:
            shapes = w.up.shape, w.down.shape
            self._layers.append((make(w.up, w.up_bias, w.up_product), make(w.down, w.down_bias, w.down_product)))
            products.append((w.up_product, w.down_product))
        if adapters is not None and has_slots:
            for place, shape in enumerate(shapes):
                self._put_slots(adapters, place, [both[place] for both in products], shape)
        self._activation = activation
        self._on_input = on_input

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        num_tokens, top_k = chosen.shape
        numbers = None if self._adapters is None else self._adapters.numbers_of(num_tokens)
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

    def _put_slots(
        self, adapters: AdapterSites, place: int, products: list[Product | None], shape: tuple[int, int]
    ) -> None:
        site = slotted(adapters, products, shape)
        if site is None:
            return
        for number, both in enumerate(self._layers):
            linear = site.linear(both[place], adapters.of_expert, number)
            self._layers[number] = (linear, both[1]) if place == 0 else (both[0], linear)

    def _narrow(self, numbers: Tensor | None) -> None:
        if self._adapters is not None:
            self._adapters.narrow(numbers)

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
