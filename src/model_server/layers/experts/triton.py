"""Experts by our Triton kernels; imported only if `kernels.availability.usable`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from model_server.kernels.decoding import Matrix
from model_server.kernels.decoding import stacked as stacked_matrices
from model_server.kernels.moe.adapters import ExpertMatrices, Shrunk, shrink
from model_server.kernels.moe.placement import MOST_WALKED, TileConfig, place, tile_configs, tiles_for
from model_server.kernels.moe.products import multiply
from model_server.layers.activation import Activation
from model_server.layers.changes import AddedMatrices, ExpertChanges
from model_server.layers.experts.experts import ExpertWeights, stacked_biases
from model_server.layers.linear.triton import Decodable, can_decode, kernel_matrix
from model_server.quantization.forms import Form
from model_server.quantization.forms.codes import Codes


class TritonExperts:
    """Grouped products of `kernels.moe.products`, without sorting, copies or questions to the device."""

    __slots__ = (
        "_activation", "_changes", "_down", "_down_bias", "_down_slots", "_num_experts", "_num_processors",
        "_on_input", "_silu", "_tiles", "_up", "_up_bias", "_up_slots",
    )  # fmt: skip

    capturable = True

    def __init__(
        self,
        weights: Sequence[ExpertWeights],
        activation: Activation,
        dtype: torch.dtype,
        *,
        on_input: bool,
        silu: bool = False,
        changes: ExpertChanges | None = None,
    ) -> None:
        self._changes = changes
        self._up_slots, self._down_slots = (
            None if changes is None else changes.experts(products, shape)
            for products, shape in (
                ([w.up_product for w in weights], weights[0].up.shape),
                ([w.down_product for w in weights], weights[0].down.shape),
            )
        )
        self._num_experts = len(weights)
        self._up = _stacked([w.up for w in weights], dtype)
        self._down = _stacked([w.down for w in weights], dtype)
        self._up_bias, self._down_bias = stacked_biases(weights)
        self._activation = activation
        self._on_input = on_input
        self._silu = silu
        self._tiles = tile_configs(dtype, {self._up.kind, self._down.kind})
        device = self._up.numbers.device
        self._num_processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        )
        if self._up.numbers.is_cuda:
            self._compile(dtype)

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        if len(hidden) == 0:
            return torch.empty_like(hidden)
        slots = None if self._changes is None else self._changes.slots_of(len(hidden))
        return self._run(hidden, weights, chosen, None, slots)

    def _compile(self, dtype: torch.dtype) -> None:
        """Compile the tiles of every number of tokens ahead of the first such batch."""
        hidden = torch.zeros(1, self._up.depth, dtype=dtype, device=self._up.numbers.device)
        for tiles in self._tiles:
            chosen = torch.zeros(1, 2, dtype=torch.int64, device=hidden.device)
            self._run(hidden, chosen.float(), chosen, tiles)
            if self._up_slots is not None or self._down_slots is not None:
                slots = torch.zeros(1, dtype=torch.int32, device=hidden.device)
                self._run(hidden, chosen.float(), chosen, tiles, slots)
            place(chosen.expand(MOST_WALKED, 2), self._num_experts, tiles)

    def _run(
        self, hidden: Tensor, weights: Tensor, chosen: Tensor, tiles: TileConfig | None, slots: Tensor | None = None
    ) -> Tensor:
        """Run with `tiles` or those for so many tokens; slots [n] int32 as `ExpertChanges.slots_of`."""
        num_tokens, top_k = chosen.shape
        tiles = tiles or tiles_for(chosen.numel(), self._num_experts, self._tiles)
        placement = place(chosen, self._num_experts, tiles)

        def added(given: AddedMatrices | None, x: Tensor, scale_input: Tensor | None = None) -> Shrunk | None:
            if given is None or slots is None:
                return None
            matrices = ExpertMatrices(given.a, given.b, given.affine)
            return shrink(
                matrices,
                x,
                placement,
                slots,
                per_token=x is hidden,
                scale_input=scale_input,
                num_processors=self._num_processors,
            )

        on_input = weights if self._on_input else None
        rows = multiply(
            hidden,
            self._up,
            self._up_bias,
            placement,
            per_token=True,
            silu=self._silu,
            scale_input=on_input,
            adapters=added(self._up_slots, hidden, on_input),
        )
        rows = rows if self._silu else self._activation(rows)
        results = multiply(
            rows,
            self._down,
            self._down_bias,
            placement,
            per_token=False,
            scale_output=None if self._on_input else weights,
            adapters=added(self._down_slots, rows),
        )
        return results if top_k == 1 else results.view(num_tokens, top_k, -1).sum(dim=1)


def _stacked(forms: Sequence[Form], dtype: torch.dtype) -> Matrix:
    """Stack all experts' matrices, as stored if they agree, else in `dtype`."""
    decoded = [form for form in forms if _is_decoded(form)]
    if len(decoded) == len(forms):
        for small_scales in (True, False):  # what small ones are like depends on the numbers of each expert
            found = stacked_matrices([kernel_matrix(form, small_scales=small_scales) for form in decoded])
            if found is not None:
                return found
    return Matrix.of_plain(torch.stack([form.dequantize(dtype) for form in forms]))


def _is_decoded(form: Form) -> TypeGuard[Decodable]:
    """Refuse codes in another order of columns: experts share inputs."""
    return can_decode(form) and not (isinstance(form, Codes) and form.order is not None)
