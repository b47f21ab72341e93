"""The adapters of a model, from their folders."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from model_server.adapters.folder import adapter_folders
from model_server.config import ServeConfig
from model_server.distributed.layout import Layout
from model_server.features.adapters.feature import Adapters
from model_server.features.adapters.residents import MOST_RESIDENT, Residents
from model_server.models.decoder.decoder import Decoder
from model_server.models.model import Model, adapter_of, in_slots, with_adapters
from model_server.runner.runner import Runner


def describe_adapters(config: ServeConfig, model: Model, device: torch.device) -> Model:
    """Add the adapters that options name, and room for later ones; except on CPUs they go into slots."""
    room = 0 if config.lora_root is None else MOST_RESIDENT
    model = with_adapters(model, adapter_folders(config.lora_adapters), room=room, max_rank=config.lora_max_rank)
    return in_slots(model, config.lora_slots) if device.type != "cpu" and (model.adapters or room) else model


def load_adapters(
    config: ServeConfig, model: Model, runner: Runner, dtype: torch.dtype, layout: Layout
) -> Adapters | None:
    """Return what requests' adapters are found by, if there may be any."""
    names, residents = runner.traits.adapters, None
    if config.lora_root is not None:
        assert isinstance(runner, Decoder) and runner.adapters is not None, "room was made for them"
        residents = Residents(
            runner.adapters,
            range(len(names), len(names) + model.adapter_room),
            Path(config.lora_root).expanduser(),
            partial(adapter_of, model),
            dtype.itemsize,
            digests=layout.node.size > 1 and layout.local.rank == 0,
        )
    return Adapters(names, runner.traits.slots, residents) if names or residents is not None else None
