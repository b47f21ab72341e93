"""What the inputs of a matrix show: how much each pair of columns matters to the layer's output."""

from __future__ import annotations

import torch
from torch import Tensor


class Hessian:
    """The mean of 2 x xᵀ over the samples' inputs x, float32 [in, in], where a sample's share is one.

    num_samples: that had tokens for this matrix.
    """

    def __init__(self, num_columns: int, device: torch.device) -> None:
        self.matrix = torch.zeros(num_columns, num_columns, dtype=torch.float32, device=device)
        self.num_samples = 0

    def add(self, inputs: Tensor) -> None:
        """inputs: [tokens, in] of one sample, any floating type."""
        if not len(inputs):
            return
        inputs = inputs.float()
        self.matrix.mul_(self.num_samples / (self.num_samples + 1))
        self.num_samples += 1
        self.matrix.addmm_(inputs.t(), inputs, alpha=2 / self.num_samples)
