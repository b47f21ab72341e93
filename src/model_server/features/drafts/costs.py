"""What steps of several sizes cost."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
import torch

from model_server.attention.metadata import AttentionMetadata
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache
from model_server.runner.runner import ModelInputs

_KEYS = 256
_MOST_ROWS = 128
# Each step is run so often, the sizes in turns, and the shortest time counts: what else runs meanwhile then slows all
# sizes alike. A step whose runs have taken so long is not run again.
_REPEATS = 5
_LIMIT_S = 0.3


class Computes(Protocol):
    """The part of a `Runner` that takes time."""

    @property
    def max_positions(self) -> int | None: ...

    def forward(self, inputs: ModelInputs, cache: KvCache) -> object: ...


def step_costs(runner: Computes, cache: KvCache, world: ProcessGroup, max_keys: int = _KEYS) -> list[tuple[int, float]]:
    """Measure (token rows, seconds) of 1 to 128 rows at 256 keys, or `max_keys`, of the slowest rank; overwrites the
    cache.
    """
    device = cache.rows[0].device
    sizes = [2**power for power in range(_MOST_ROWS.bit_length())]
    inputs = {rows: _inputs(rows, runner, cache, min(_KEYS, max_keys)) for rows in sizes}
    shortest, spent = dict.fromkeys(sizes, float("inf")), dict.fromkeys(sizes, 0.0)
    for rows in sizes:
        runner.forward(inputs[rows], cache)
    finish(device)
    for repeat in range(_REPEATS):
        for rows in sizes:
            if repeat and not world.all_reduce_min(int(spent[rows] < _LIMIT_S)):
                continue
            begun = time.perf_counter()
            runner.forward(inputs[rows], cache)
            finish(device)
            seconds = time.perf_counter() - begun
            shortest[rows] = min(shortest[rows], seconds)
            spent[rows] += seconds
    return [(rows, -world.all_reduce_min(-round(shortest[rows] * 1e9)) / 1e9) for rows in sizes]


def finish(device: torch.device) -> None:
    """Wait for what was enqueued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _inputs(rows: int, runner: Computes, cache: KvCache, keys: int) -> ModelInputs:
    keys = min(keys, runner.max_positions or keys, (cache.num_blocks - 1) * cache.block_size)
    width = -(-keys // cache.block_size)
    blocks = 1 + np.arange(rows * width) % (cache.num_blocks - 1)
    tables = blocks.reshape(rows, width).astype(np.int32)
    slots = tables[:, -1].astype(np.int64) * cache.block_size + (keys - 1) % cache.block_size
    device = cache.rows[0].device
    metadata = AttentionMetadata(
        slots=torch.from_numpy(slots).to(device),
        block_tables=torch.from_numpy(tables).to(device),
        cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=device),
        kv_lengths=torch.full((rows,), keys, dtype=torch.int32, device=device),
        query_lengths_host=(1,) * rows,
        kv_lengths_host=(keys,) * rows,
    )
    ids = torch.zeros(rows, dtype=torch.int64, device=device)
    return ModelInputs(ids, torch.full_like(ids, keys - 1), metadata, None)
