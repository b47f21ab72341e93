"""Experts by our Triton kernels. Imported only where `kernels.availability.usable` says so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model_server.kernels.moe import TileConfig, multiply, place, tile_configs
from model_server.layers.activation import Activation
from model_server.layers.experts.experts import ExpertWeights, stacked, stacked_biases


class TritonExperts:
    """Grouped products by `kernels.moe`, without sorting or copying rows. Asks the device for nothing."""

    __slots__ = ("_activation", "_down", "_down_bias", "_on_input", "_silu", "_up", "_up_bias")

    capturable = True

    def __init__(
        self,
        weights: Sequence[ExpertWeights],
        activation: Activation,
        dtype: torch.dtype,
        *,
        on_input: bool,
        silu: bool = False,
    ) -> None:
        self._up, self._down = stacked(weights, dtype)
        self._up_bias, self._down_bias = stacked_biases(weights)
        self._activation = activation
        self._on_input = on_input
        self._silu = silu
        if self._up.is_cuda:
            self._compile()

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return torch.empty_like(hidden) if len(hidden) == 0 else self._run(hidden, weights, chosen, None)

    def _compile(self) -> None:
        """Every number of tokens has its tiles; the first batch of its size would wait for the compiler."""
        hidden = self._up.new_zeros(1, self._up.shape[2])
        for tiles in tile_configs(hidden.dtype):
            chosen = torch.zeros(1, 2, dtype=torch.int64, device=hidden.device)
            self._run(hidden, chosen.float(), chosen, tiles)

    def _run(self, hidden: Tensor, weights: Tensor, chosen: Tensor, tiles: TileConfig | None) -> Tensor:
        num_tokens, top_k = chosen.shape
        placement = place(chosen, len(self._up), hidden.dtype, tiles)
        rows = multiply(
            hidden,
            self._up,
            self._up_bias,
            placement,
            per_token=True,
            silu=self._silu,
            scale_input=weights if self._on_input else None,
        )
        results = multiply(
            rows if self._silu else self._activation(rows),
            self._down,
            self._down_bias,
            placement,
            per_token=False,
            scale_output=None if self._on_input else weights,
        )
        return results if top_k == 1 else results.view(num_tokens, top_k, -1).sum(dim=1)
