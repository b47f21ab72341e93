"""Where this rank computes: on which device, in which type, and with which other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from model_server.distributed.group import ProcessGroup


@dataclass(frozen=True, slots=True)
class Placement:
    """group: the ranks among which every layer's weights are divided.

    dtype: of weights, activations and KV cache.
    """

    device: torch.device
    dtype: torch.dtype
    group: ProcessGroup = field(default_factory=ProcessGroup)
