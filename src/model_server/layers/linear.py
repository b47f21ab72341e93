"""Matrix products. Column-parallel layers are plain `Linear`s of this rank's rows; row-parallel ones reduce."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from model_server.distributed import ProcessGroup


class Linear:
    """`x @ weight.T + bias`; weight [out, in], bias [out] or None."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class RowParallelLinear:
    """A Linear over this rank's columns, summed over the ranks. The bias, if any, is given on rank 0 alone."""

    __slots__ = ("_group", "_linear")

    def __init__(self, linear: Linear, group: ProcessGroup) -> None:
        self._linear = linear
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self._linear(x))
