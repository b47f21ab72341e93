"""What counts as the same logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from model_server.models.hf.self_check import NARROW, PREFILLED, compare, narrow_windows

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


def test_windows_that_requests_outgrow_are_narrow_for_the_check() -> None:
    config: Any = SimpleNamespace(sliding_window=64, get_text_config=lambda decoder: config)
    inside, outside = SimpleNamespace(sliding_window=64), SimpleNamespace(window_size=(3, 3))
    model = SimpleNamespace(config=config, modules=lambda: [inside, outside])
    with narrow_windows(model, 512) as are_narrow:
        assert are_narrow and config.sliding_window == inside.sliding_window == NARROW < min(PREFILLED)
    assert config.sliding_window == inside.sliding_window == 64 and outside.window_size == (3, 3)
    with narrow_windows(model, 64) as are_narrow:
        assert not are_narrow and config.sliding_window == 64
