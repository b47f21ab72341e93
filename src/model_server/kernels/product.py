"""The product of two tiles in every matrix kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from model_server.kernels.trial import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def product(left, right, sums):
    """Compute sums + left @ right in float32, never TF32."""
    if _INTERPRETED:  # the interpreter holds bfloat16 as plain bits
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums)
    return tl.dot(left, right, sums, input_precision="ieee")
