"""Whether Triton works in this process: interpreted or compiled, and one kernel that has nothing to fail by itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from model_server.kernels.variant import Variant

_WRITTEN = 7


@triton.jit
def write_constant(out, VALUE: tl.constexpr):
    tl.store(out, VALUE)


# With TRITON_INTERPRET=1 `triton.jit` makes no JITFunction, in every version of Triton.
INTERPRETED = not isinstance(write_constant, triton.JITFunction)


def launch(device: torch.device) -> None:
    """Compile one kernel for the GPU `device`, run it and wait for it.

    Raises whatever Triton raises where it cannot compile, and RuntimeError if the kernel has not run.
    """
    with torch.cuda.device(device):
        out = torch.zeros(1, dtype=torch.int32, device=device)
        write_constant[(1,)](out, VALUE=_WRITTEN)
        if int(out) != _WRITTEN:
            raise RuntimeError("a kernel was launched and wrote nothing")


def variants() -> list[Variant]:
    """The only form."""
    return [Variant(name="trial", kernel=write_constant, signature={"out": "*i32"}, constants={"VALUE": _WRITTEN})]
