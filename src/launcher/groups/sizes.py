"""What each of several models takes of the memory that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from launcher.errors import ArgumentValidation
from launcher.groups.group import Group
from launcher.groups.pool import Bounds
from launcher.planning.hardware import Hardware
from launcher.planning.memory import dtype_of, weight_bytes
from launcher.planning.model_info import read, shown_bytes
from wire.host import kv_memory

_SHARE = 0.8
"""Of the free memory, for all models, where no option says how much."""
_PROCESSES = 640 << 20
"""Of a model's processes, beside weights and KV cache."""
_GPU_SHARE = 0.1
"""Of a model's memory on a GPU, for activations and graphs."""


def divide(groups: Sequence[Group], machine: Hardware, models_memory: int | None, most: int | None) -> Bounds:
    """Give each group's plan its part, and return what all may take together.

    Where the models fit together if their KV caches are small enough, the default caches are.

    Raises:
        ArgumentValidation: A model's size must be said, or can never fit.
    """
    sizes = [gpu.memory_mib << 20 for gpu in machine.gpus if gpu.memory_mib]
    if machine.gpus:
        _require_memory(groups, most)
        free = min(sizes, default=0)
    else:
        free = machine.free_bytes or machine.memory_bytes or 0
    whole = models_memory if models_memory is not None else int(free * _SHARE)
    weights = [_weights(group, machine) for group in groups]
    rest = whole - sum(weights) - _PROCESSES * len(groups)
    num_caches = sum(group.task == "generate" for group in groups)
    for group, size in zip(groups, weights, strict=True):
        if group.entry.memory is not None:
            _bound_cache(group, size, machine)
        elif rest > 0 and group.task == "generate":
            share = int(rest / num_caches / kv_memory.SHARE)
            group.model.machine = dataclasses.replace(machine, free_bytes=min(whole, size + share))
    for group in groups:
        size = memory_of(group, machine)
        if size > whole > 0:
            raise ArgumentValidation(
                f"{group.entry.name} takes {shown_bytes(size)}, and all models together may take {shown_bytes(whole)}: "
                "raise `--models-memory`, or give it a smaller `memory` or `kv_cache_memory` in the file of `--models`"
            )
    return Bounds(memory=whole, models=most)


def memory_of(group: Group, machine: Hardware) -> int:
    """Return the bytes that a group counts for, of the host or of each GPU."""
    if group.entry.memory is not None:
        return group.entry.memory
    if machine.gpus:  # the only one that is loaded
        return 0
    plan = group.plan()
    cache = (plan.memory.tokens or 0) * (plan.memory.token or 0) * plan.num_shard
    states = plan.memory.state * (plan.memory.requests or 0) * plan.num_shard
    return (plan.memory.weights or 0) + cache + states + _PROCESSES


def _require_memory(groups: Sequence[Group], most: int | None) -> None:
    unsaid = [group.entry.name for group in groups if group.entry.memory is None]
    if unsaid and most != 1:
        raise ArgumentValidation(
            f"a model on a GPU takes all that is free: give {', '.join(unsaid)} a `memory` in GiB in the file of "
            "`--models`, or serve one at a time with `--max-loaded-models 1`"
        )


def _weights(group: Group, machine: Hardware) -> int:
    """Return the bytes of a model's weights in memory, as far as they are known."""
    config, info = group.entry.config, read(group.model.directory)
    if info is None:
        return 0
    width = 4 if dtype_of(config, info, machine) == "float32" else 2
    return weight_bytes(info, config.quantize, width, on_gpu=bool(machine.gpus)) or 0


def _bound_cache(group: Group, weights: int, machine: Hardware) -> None:
    """Give the KV cache what a model's `memory` leaves beside its weights."""
    entry, config = group.entry, group.model.config
    assert entry.memory is not None
    num_shard = group.plan().num_shard
    if machine.gpus:
        room = (int(entry.memory * (1 - _GPU_SHARE)) - weights // num_shard) * num_shard
    else:
        room = entry.memory - weights - _PROCESSES
    asked = config.kv_cache_memory or config.max_batch_total_tokens
    if room <= 0:
        raise ArgumentValidation(
            f"`memory` of {entry.name} is {shown_bytes(entry.memory)}, and its weights and processes take about "
            f"{shown_bytes(weights // (num_shard if machine.gpus else 1) + _PROCESSES)}: give it more"
        )
    if asked is None and group.task == "generate":
        group.model.config = dataclasses.replace(config, kv_cache_memory=room)
