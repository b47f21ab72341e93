"""Which fused element-wise operators a model gets."""

from __future__ import annotations

import torch

from model_server.cpp import library
from model_server.kernels import availability
from model_server.layers.fused.cpp import CppFused
from model_server.layers.fused.fused import Fused
from model_server.layers.fused.torch import TorchFused


def fused_for(device: torch.device, dtype: torch.dtype) -> Fused:
    """Return the fastest implementation for a type on a device."""
    if availability.usable(device) and dtype in (torch.float16, torch.bfloat16, torch.float32):
        from model_server.layers.fused.triton import TritonFused  # needs Triton

        return TritonFused(device)
    if library.usable(device, dtype):
        return CppFused()
    return TorchFused()
