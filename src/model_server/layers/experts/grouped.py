"""Experts by torch's grouped product, without our kernels."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.layers.activation import Activation
from model_server.layers.experts.experts import ExpertWeights, combine, stacked

# Of torch's own grouped products.
GROUPED_CAPABILITY = (9, 0)


class GroupedExperts:
    """One grouped product for all experts, sorted on the device."""

    # torch has a kernel for bfloat16 on capability 9.0 and later; elsewhere it multiplies expert by expert, and asks
    # the device where each begins (`aten/src/ATen/native/GroupedMMUtils.h`).
    __slots__ = ("_activation", "_down", "_down_bias", "_ids", "_on_input", "_up", "_up_bias", "capturable")

    def __init__(
        self,
        weights: Iterable[ExpertWeights],
        num_experts: int,
        activation: Activation,
        dtype: torch.dtype,
        *,
        on_input: bool,
    ) -> None:
        stacks = stacked(weights, num_experts, dtype)
        # Stored [expert, out, in], multiplied as [expert, in, out].
        self._up, self._down = stacks.up.transpose(1, 2), stacks.down.transpose(1, 2)
        self._up_bias, self._down_bias = stacks.up_bias, stacks.down_bias
        self._ids = torch.arange(num_experts, device=self._up.device)
        self._activation = activation
        self._on_input = on_input
        self.capturable = (
            self._up.dtype == torch.bfloat16
            and self._up.is_cuda
            and torch.cuda.get_device_capability(self._up.device) >= GROUPED_CAPABILITY
        )

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        top_k = chosen.shape[1]
        experts, order = chosen.flatten().sort()
        ends = torch.searchsorted(experts, self._ids, right=True).int()
        rows = hidden.index_select(0, order // top_k)
        if self._on_input:
            rows.mul_(weights.flatten()[order].unsqueeze(1))
        rows = self._activation(_grouped(rows, self._up, self._up_bias, ends, experts))
        results = _grouped(rows, self._down, self._down_bias, ends, experts)
        return combine(results, order, None if self._on_input else weights, top_k)


def _grouped(rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, experts: Tensor) -> Tensor:
    product = F.grouped_mm(rows, weight, offs=ends)
    return product if bias is None else product.add_(bias.index_select(0, experts))
