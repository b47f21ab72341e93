"""Where this rank computes: device, type, and other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Ranks


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a rank's computation, and its types."""

    device: torch.device
    # Of weights and activations.
    dtype: torch.dtype
    ranks: Ranks = field(default_factory=lambda: Ranks.of(ProcessGroup()))
    # Of the KV cache; None: `dtype`.
    cache_dtype: torch.dtype | None = None
    # A row's result may not depend on the rows beside it.
    batch_invariant: bool = False
    # The longest draft, which the cache must be able to take back.
    num_drafted: int = 0
