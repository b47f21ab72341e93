"""Loading a model as the shard does, with less to say."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from model_server.attention.backend import AttentionBackend, AttentionLayer
from model_server.attention.choice import AttentionChoice
from model_server.attention.reference import ReferenceBackend
from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Ranks
from model_server.distributed.placement import Placement
from model_server.features.adapters.load import in_slots, with_adapters
from model_server.models.load import load_runner
from model_server.models.model import describe
from model_server.runner.runner import Runner
from model_server.weights.checkpoint import examine

CPU = torch.device("cpu")


def child_environment() -> dict[str, str]:
    """For a process that imports this, too."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


class FixedAttention(AttentionChoice):
    """One backend, whatever the layers."""

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__(None, CPU)
        self._backend = backend

    def for_layers(self, layers: Sequence[AttentionLayer] = ()) -> AttentionBackend:
        return self._backend


def load(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    group: ProcessGroup | None = None,
    ranks: Ranks | None = None,
    backend: AttentionBackend | None = None,
    trust_remote_code: bool = False,
    rope_factor: float | None = None,
    cache_dtype: torch.dtype | None = None,
    adapters: Mapping[str, Path] | None = None,
    merged: Path | None = None,
    adapter_room: int = 0,
    quantize: str | None = None,
    adapter_slots: int | None = None,
) -> Runner:
    """The model in `path` on the CPU. group: one stage of these ranks; ranks: several. backend: None: the reference.
    merged: the folder of an adapter that is merged into it. quantize: `--quantize`. adapter_slots: as a GPU has them;
    None: as a CPU does."""
    described = describe(examine(path, merged), rope_factor=rope_factor, quantize=quantize)
    model = with_adapters(described, adapters or {}, room=adapter_room)
    return load_runner(
        model if adapter_slots is None else in_slots(model, adapter_slots),
        Placement(CPU, dtype, ranks or Ranks.of(group or ProcessGroup()), cache_dtype),
        FixedAttention(backend or ReferenceBackend()),
        trust_remote_code=trust_remote_code,
    )
