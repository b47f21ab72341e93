"""The adapters of a model, from their folders."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from model_server.adapters.folder import Adapter, adapter_folders, read_adapter
from model_server.adapters.product_slots import SlotSizes
from model_server.config import ServeConfig
from model_server.distributed.layout import Layout
from model_server.errors import StartupError
from model_server.features.adapters.feature import Adapters
from model_server.features.adapters.residents import MOST_RESIDENT, Residents
from model_server.models.decoder.decoder import Decoder
from model_server.models.decoder.products import model_products
from model_server.models.model import Model, check_rank, module_bases, warn_of_other_base
from model_server.runner.runner import Runner
from wire.adapters import DEFAULT_RANK, DEFAULT_SLOTS, RANKS


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


def with_adapters(model: Model, folders: Mapping[str, Path], *, room: int = 0, max_rank: int | None = None) -> Model:
    """Add LoRA adapters by name.

    Args:
        room: For later ones.
        max_rank: None: any that is read.
    """
    if not folders and not room:
        return model
    if model.spec is None:
        if room:
            raise StartupError(
                f"--lora-root: {model.config.model_type} is served by the transformers runner, whose adapters are "
                "loaded with the model: name them in --lora-adapters"
            )
        return dataclasses.replace(model, adapter_folders=folders, max_adapter_rank=max_rank)
    targets = model_products(model.spec)
    model = dataclasses.replace(model, adapter_room=room, max_adapter_rank=max_rank, targets=targets)
    return dataclasses.replace(model, adapters=tuple(adapter_of(model, *one) for one in folders.items()))


def in_slots(model: Model, number: int | None) -> Model:
    """Copy adapters into slots of the device when rows need them.

    Args:
        number: At most; None: DEFAULT_SLOTS. Without later adapters there are no more than loaded ones.
    """
    # The rank of the slots is the largest that is allowed; if none is set, that of the largest adapter loaded with the
    # model, and for later ones DEFAULT_RANK.
    largest = max((adapter.rank for adapter in model.adapters), default=1)
    rank = model.max_adapter_rank or max(DEFAULT_RANK if model.adapter_room else 1, largest)
    number = number or DEFAULT_SLOTS
    if not model.adapter_room:
        number = min(number, len(model.adapters))
    slots = SlotSizes(number=number, rank=next(size for size in RANKS if size >= rank))
    return dataclasses.replace(model, slots=slots, max_adapter_rank=slots.rank)


def adapter_of(model: Model, name: str, folder: Path) -> Adapter:
    """Check the adapter in `folder` for a native model."""
    assert model.spec is not None and model.targets is not None
    found = read_adapter(name, folder, model.targets, module_bases(model, model.spec))
    check_rank(model, found)
    warn_of_other_base(model, found)
    return found
