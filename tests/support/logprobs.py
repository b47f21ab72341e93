"""Log probabilities as tests compare them: two that differ by how sums are rounded are the same."""

from __future__ import annotations

import math
from collections.abc import Iterable

# Sums of other shapes differ by about 1e-6 in float32; a wrong token or column by far more than this.
TOLERANCE = 1e-4


class Logprob(float):
    """Equal to each number within `TOLERANCE`, and NaN to NaN. Rounding would tell apart two beside a border."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int | float):
            return NotImplemented
        return (math.isnan(self) and math.isnan(other)) or math.isclose(self, other, rel_tol=0.0, abs_tol=TOLERANCE)

    def __ne__(self, other: object) -> bool:
        return not self == other


def logprobs_of(values: Iterable[float]) -> list[Logprob]:
    return [Logprob(value) for value in values]
