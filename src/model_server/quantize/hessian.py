"""How much each pair of a matrix's inputs matters to the output."""

from __future__ import annotations

import torch
from torch import Tensor


class Hessian:
    """The mean of 2 x xᵀ over samples' inputs x, float32 [in, in], equal shares."""

    def __init__(self, num_columns: int, device: torch.device) -> None:
        self.matrix = torch.zeros(num_columns, num_columns, dtype=torch.float32, device=device)
        # With tokens for this matrix.
        self.num_samples = 0

    def add(self, inputs: Tensor) -> None:
        """Add one sample's inputs [tokens, in]."""
        if not len(inputs):
            return
        inputs = inputs.float()
        self.matrix.mul_(self.num_samples / (self.num_samples + 1))
        self.num_samples += 1
        self.matrix.addmm_(inputs.t(), inputs, alpha=2 / self.num_samples)
