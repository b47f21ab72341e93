"""What this process computes on: device, number type, threads. The only file outside `attention/` that asks.

Knows nothing of models beyond their number of weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch

from model_server.errors import StartupError

logger = logging.getLogger(__name__)

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def resolve_device(rank: int, world_size: int) -> torch.device:
    """The CUDA device of this rank if there is one (CUDA_VISIBLE_DEVICES="" hides them all), else the CPU.

    Raises StartupError if there are GPUs, but fewer than shards.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if world_size > count:
        raise StartupError(f"{world_size} shards need as many GPUs, {count} visible; lower --num-shard")
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device
