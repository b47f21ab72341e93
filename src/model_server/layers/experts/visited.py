"""Experts one after the other, for CPUs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from model_server.layers.activation import Activation
from model_server.layers.experts.experts import ExpertWeights, combine
from model_server.layers.linear.factory import LinearFactory


class VisitedExperts:
    """One product after the other, over the experts that got tokens. Asks the device which these are."""

    __slots__ = ("_activation", "_layers", "_on_input")

    capturable = False

    def __init__(
        self, weights: Iterable[ExpertWeights], activation: Activation, linears: LinearFactory, *, on_input: bool
    ) -> None:
        make = linears.make
        self._layers = [(make(w.up, w.up_bias), make(w.down, w.down_bias)) for w in weights]
        self._activation = activation
        self._on_input = on_input

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        num_tokens, top_k = chosen.shape
        if num_tokens == 1:
            return self._single(hidden, weights, chosen[0].tolist())
        order = chosen.flatten().argsort()
        counts = chosen.flatten().bincount(minlength=len(self._layers)).tolist()
        rows = hidden.index_select(0, order // top_k)
        if self._on_input:
            rows.mul_(weights.flatten()[order].unsqueeze(1))
        results = torch.empty_like(rows)
        start = 0
        for (up, down), count in zip(self._layers, counts, strict=True):
            if count:
                stop = start + count
                results[start:stop] = down(self._activation(up(rows[start:stop])))
                start = stop
        return combine(results, order, None if self._on_input else weights, top_k)

    def _single(self, hidden: Tensor, weights: Tensor, chosen: list[int]) -> Tensor:
        """Decode of one sequence: nothing to sort."""
        results = []
        for place, expert in enumerate(chosen):
            up, down = self._layers[expert]
            read = hidden * weights[:, place : place + 1].to(hidden.dtype) if self._on_input else hidden
            results.append(down(self._activation(up(read))))
        if len(results) == 1 and self._on_input:
            return results[0]
        given = torch.cat(results)
        return given.sum(dim=0, keepdim=True) if self._on_input else weights.to(given.dtype) @ given
