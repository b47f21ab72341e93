"""Scores that sharpen with the query's position (arXiv 2501.19399), without rotation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Multiplies queries at p by 1 + strength * log(1 + floor((p + offset) / interval))."""

    strength: float
    interval: float
    offset: int = 1

    def __call__(self, positions: Tensor) -> Tensor:
        """Return factors [n, 1, 1] float32 of positions [n]."""
        steps = torch.floor((positions.float() + self.offset) / self.interval)
        return torch.log1p(steps).mul_(self.strength).add_(1).view(-1, 1, 1)
