"""Where this rank computes: on which device, in which type, and with which other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Ranks


@dataclass(frozen=True, slots=True)
class Placement:
    """dtype: of weights and activations. ranks: unset: this one alone. cache_dtype: of the KV cache; None: `dtype`.
    batch_invariant: a row's result may not depend on the rows beside it. num_drafted: the longest draft, behind which
    the cache must be able to go back.
    """

    device: torch.device
    dtype: torch.dtype
    ranks: Ranks = field(default_factory=lambda: Ranks.of(ProcessGroup()))
    cache_dtype: torch.dtype | None = None
    batch_invariant: bool = False
    num_drafted: int = 0
