"""bfloat16 without torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32 numbers, rounded to nearest even as torch rounds."""
    bits = np.ascontiguousarray(values).view("<u4")
    rounded: npt.NDArray[np.uint16] = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    return rounded
