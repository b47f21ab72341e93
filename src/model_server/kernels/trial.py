"""Whether Triton works here, interpreted or compiled, by a trivial kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WRITTEN = 7


@triton.jit
def write_constant(out, VALUE: tl.constexpr):
    tl.store(out, VALUE)


# With TRITON_INTERPRET=1 `triton.jit` makes no JITFunction, in every version of Triton.
INTERPRETED = not isinstance(write_constant, triton.JITFunction)


def launch(device: torch.device) -> None:
    """Compile and run a kernel on the GPU `device`, and wait.

    Raises:
        RuntimeError: It has not run; Triton raises its own errors.
    """
    with torch.cuda.device(device):
        out = torch.zeros(1, dtype=torch.int32, device=device)
        write_constant[(1,)](out, VALUE=_WRITTEN)
        if int(out) != _WRITTEN:
            raise RuntimeError("a kernel was launched and wrote nothing")
