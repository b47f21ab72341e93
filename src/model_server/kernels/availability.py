"""Whether kernels can run here: the only question that code outside this package asks before it imports one."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

# bfloat16 products, asynchronous copies and 64 KiB of shared memory and more: Ampere and later.
OLDEST_CAPABILITY = (8, 0)


@cache
def usable(device: torch.device) -> bool:
    """Triton is installed and `device` can run its kernels: a GPU of capability 8.0 or later, or a CPU while Triton's
    interpreter is on (TRITON_INTERPRET=1: for tests, a thousand times slower)."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY
    if device.type == "cpu":
        from triton import knobs

        return bool(knobs.runtime.interpret)
    return False


def has_float8(device: torch.device) -> bool:
    """Whether kernels on `device` convert from and to float8_e4m3fn: GPUs from capability 8.9 on, and interpreted."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
