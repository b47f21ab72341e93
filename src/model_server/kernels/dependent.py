"""Programmatic dependent launch: a kernel takes its place while the one before still runs."""

# On GPUs of capability 9.0 and later that hides a part of what starting a kernel costs: 4 % of a decode step of one row
# of an 8B model on an H200. A kernel with `EARLY` may read what no kernel writes, such as weights, and then calls
# `after_previous`, on every path, before it reads or writes anything else: all kernels before it have ended then, since
# each of them has waited, too.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from model_server.kernels.trial import INTERPRETED

EARLIEST_CAPABILITY = (9, 0)


@cache
def early_launch(device: torch.device) -> dict[str, bool]:
    """Return the launch arguments of a kernel with `EARLY`."""
    if INTERPRETED or device.type != "cuda":
        return {"EARLY": False}
    return early_on(torch.cuda.get_device_capability(device))


def early_on(capability: tuple[int, int]) -> dict[str, bool]:
    """Return them for a capability; Triton before 3.4 has none."""
    if capability < EARLIEST_CAPABILITY or not hasattr(tl.extra.cuda, "gdc_wait"):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def after_previous(EARLY: tl.constexpr):
    """Wait for the kernel before this, and admit the one after."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
