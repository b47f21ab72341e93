"""Small host values to the device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`. From pageable memory torch waits for all queued work; from pinned memory it need not."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
