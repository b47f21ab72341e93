"""The experts of one layer: every token is read by a few of many MLPs.

Tokens are sorted by expert, so that every expert multiplies its tokens at once. Measured by `benchmarks.moe` on a CPU
with AVX-512 (8, 64 and 128 experts, 1 to 512 tokens): copying the chosen weights together for a batched product takes 4
to 75 times as long as visiting the experts where they are. Visits with packed matrices (`layers.linear`) are quicker
than a grouped product, 1.1 to 2.4 times in bfloat16 and up to 1.8 times in float32, but have to ask the device who got
tokens. Hence several classes, chosen by `make_experts`; on GPUs that can run them, kernels of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.kernels.availability import usable
from model_server.layers.activation import Activation
from model_server.layers.linear.linear import Linear

if TYPE_CHECKING:
    from model_server.kernels.moe import Form


# Of torch's own grouped products.
GROUPED_CAPABILITY = (9, 0)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert's part on this rank.

    up: [2 * n, hidden] if gated, gate first; down: [hidden, n]. Biases: all experts of a layer have one, or none.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


# Tokens [n, hidden], weights [n, top_k] float32, experts [n, top_k] int64 -> weighted sums [n, hidden].
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def make_experts(
    weights: Sequence[ExpertWeights], activation: Activation, *, on_input: bool = False, silu: bool = False
) -> Experts:
    """The quickest way for the device that the weights are on. `on_input`: see `Routing`.

    silu: `activation` is silu(gate) * up, which the kernels can take into the product.
    """
    device = weights[0].up.device
    if device.type != "cpu" and usable(device):
        return KernelExperts(weights, activation, on_input=on_input, silu=silu)
    if device.type == "cpu" or not hasattr(F, "grouped_mm"):
        return VisitedExperts(weights, activation, on_input=on_input)
    return GroupedExperts(weights, activation, on_input=on_input)


class VisitedExperts:
    """One product after the other, over the experts that got tokens. Asks the device which these are."""

    __slots__ = ("_activation", "_layers", "_on_input")

    capturable = False

    def __init__(self, weights: Sequence[ExpertWeights], activation: Activation, *, on_input: bool) -> None:
        self._layers = [(Linear(w.up, w.up_bias), Linear(w.down, w.down_bias)) for w in weights]
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
        return _combine(results, order, None if self._on_input else weights, top_k)

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


class GroupedExperts:
    """One grouped product for all experts, sorted on the device.

    torch has a kernel for it for bfloat16 on capability 9.0 and later, and elsewhere multiplies expert by expert, for
    which it asks the device where each begins (`aten/src/ATen/native/GroupedMMUtils.h`).
    """

    __slots__ = ("_activation", "_down", "_down_bias", "_ids", "_on_input", "_up", "_up_bias", "capturable")

    def __init__(self, weights: Sequence[ExpertWeights], activation: Activation, *, on_input: bool) -> None:
        # Stored [expert, out, in], multiplied as [expert, in, out].
        self._up = torch.stack([w.up for w in weights]).transpose(1, 2)
        self._down = torch.stack([w.down for w in weights]).transpose(1, 2)
        self._up_bias, self._down_bias = _stacked_biases(weights)
        self._ids = torch.arange(len(weights), device=self._up.device)
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
        return _combine(results, order, None if self._on_input else weights, top_k)


class KernelExperts:
    """Grouped products by `kernels.moe`, without sorting or copying rows. Asks the device for nothing."""

    __slots__ = ("_activation", "_down", "_down_bias", "_on_input", "_silu", "_up", "_up_bias")

    def __init__(
        self, weights: Sequence[ExpertWeights], activation: Activation, *, on_input: bool, silu: bool = False
    ) -> None:
        self._up = torch.stack([w.up for w in weights])
        self._down = torch.stack([w.down for w in weights])
        self._up_bias, self._down_bias = _stacked_biases(weights)
        self._activation = activation
        self._on_input = on_input
        self._silu = silu
        if self._up.is_cuda:
            self._compile()

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return torch.empty_like(hidden) if len(hidden) == 0 else self._run(hidden, weights, chosen, None)

    def _compile(self) -> None:
        """Every number of tokens has its form: without this the first batch of its size would wait for the compiler."""
        from model_server.kernels.moe import forms

        hidden = self._up.new_zeros(1, self._up.shape[2])
        for form in forms(hidden.dtype):
            chosen = torch.zeros(1, 2, dtype=torch.int64, device=hidden.device)
            self._run(hidden, chosen.float(), chosen, form)

    def _run(self, hidden: Tensor, weights: Tensor, chosen: Tensor, form: Form | None) -> Tensor:
        from model_server.kernels.moe import multiply, place

        num_tokens, top_k = chosen.shape
        placement = place(chosen, len(self._up), hidden.dtype, form)
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


def _stacked_biases(weights: Sequence[ExpertWeights]) -> tuple[Tensor | None, Tensor | None]:
    """Of all experts: up [experts, out], down [experts, out]."""
    up, down = (
        None if biases[0] is None else torch.stack([b for b in biases if b is not None])
        for biases in ([w.up_bias for w in weights], [w.down_bias for w in weights])
    )
    return up, down


def _grouped(rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, experts: Tensor) -> Tensor:
    product = F.grouped_mm(rows, weight, offs=ends)
    return product if bias is None else product.add_(bias.index_select(0, experts))


def _combine(results: Tensor, order: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    """Sums per token of `results` [n * top_k, hidden], which stand in `order`; weights [n, top_k], None: ones."""
    restored = torch.empty_like(results).index_copy_(0, order, results)
    if top_k == 1 and weights is None:
        return restored
    restored = restored.view(-1, top_k, results.shape[1])
    if weights is None:
        return restored.sum(dim=1)
    return torch.bmm(weights.to(restored.dtype).unsqueeze(1), restored).squeeze(1)
