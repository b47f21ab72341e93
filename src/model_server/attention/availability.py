"""Why a backend cannot be used, in words for the user."""

from __future__ import annotations

import torch

# What the flash-attn family of kernels computes in.
FLOAT16_TYPES = (torch.float16, torch.bfloat16)


class UnavailableError(Exception):
    """The backend is not installed, or not for this device or number type."""


def require_ampere(device: torch.device, dtype: torch.dtype) -> None:
    """Raise UnavailableError unless this is a 16-bit type on a GPU of capability 8.0."""
    if device.type != "cuda":
        raise UnavailableError(f"it computes on a CUDA device, not on {device.type}")
    if torch.version.hip is not None:
        raise UnavailableError("it is for NVIDIA's GPUs")
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise UnavailableError("it needs a GPU of capability 8.0 or later")
    if dtype not in FLOAT16_TYPES:
        raise UnavailableError(f"it computes in float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}")
