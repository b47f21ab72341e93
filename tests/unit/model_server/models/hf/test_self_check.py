"""What counts as the same logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_server.models.hf.self_check import compare

LEAST = torch.finfo(torch.float32).min


def logits(seed: int = 0, masked: tuple[int, ...] = ()) -> Tensor:
    rows = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
    rows[:, list(masked)] = LEAST
    return rows


@pytest.mark.parametrize(
    ("got", "want", "passed"),
    [
        (logits(), logits() + 1e-6, True),
        (logits(), logits(1), False),
        # Tokens that are never chosen, as those of Chameleon's images, do not make the others look alike.
        (logits(0, (2,)), logits(0, (2,)) + 1e-6, True),
        (logits(0, (2,)), logits(1, (2,)), False),
        (logits(0, (2,)), logits(), False),
        (logits(), logits(0, (2,)), False),
        (logits(0, tuple(range(8))), logits(0, tuple(range(8))), False),
        (logits() * float("nan"), logits(), False),
    ],
)
def test_compare(got: Tensor, want: Tensor, passed: bool) -> None:
    assert compare([got], [want], 1e-4, torch.float32).passed is passed
