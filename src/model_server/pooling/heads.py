"""Heads that score a text: from the hidden states of some of its tokens to one number for each label."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

# Hidden states of each text [tokens, hidden] -> scores [texts, labels] in float32.
ScoreHead = Callable[[Sequence[Tensor]], Tensor]
