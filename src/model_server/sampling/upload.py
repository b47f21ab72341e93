"""Small values from the host to the device and back, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`. From pageable memory torch waits for all queued work; from pinned memory it need not."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def download(tensor: Tensor) -> Tensor:
    """`tensor` on the host. From a GPU the copy is only queued: read it once an event recorded after it is over."""
    if not tensor.is_cuda:
        return tensor
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)
