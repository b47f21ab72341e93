"""How a logprob is written in JSON."""

from __future__ import annotations

import math

import numpy as np


def float32(value: float) -> np.float32 | None:
    """The shortest decimal that reads back as the same float32, as TGI prints it; what is not finite is null."""
    return np.float32(value) if math.isfinite(value) else None
