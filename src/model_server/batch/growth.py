"""Blocks for running requests that grow, and rows that lack one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model_server.batch.batch import Batch
from model_server.batch.sequence import Sequence
from model_server.batch.tables import BlockTables
from model_server.memory.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class BlockGrowth:
    """More blocks for a running request."""

    request_id: int
    blocks: npt.NDArray[np.int64]


# A row that cannot take part in a step, and why.
Failure = tuple[Sequence, str]


def append_blocks(
    batch: Batch, tables: BlockTables, new_blocks: Iterable[BlockGrowth], cache: KvCache
) -> list[Failure]:
    """Append blocks to running requests' tables, skipping ended ones; return what does not fit."""
    sequences = {s.id: s for s in batch.sequences}
    failures = []
    for more in new_blocks:
        sequence = sequences.get(more.request_id)
        if sequence is None:
            continue
        reason = _misfit(sequence, more, cache)
        if reason is None:
            tables.extend(sequence, more.blocks, cache.block_size)
        elif not sequence.finished:
            failures.append((sequence, reason))
    return failures


def rows_without_slots(batch: Batch) -> list[Failure]:
    return [
        (s, f"request {s.id}: it has {len(s.slots)} slots, none for its next token")
        for s in batch.sequences
        if not (s.has_slots or s.is_exhausted or s.finished)
    ]


def will_have_slots(batch: Batch, new_blocks: Iterable[BlockGrowth], cache: KvCache) -> bool:
    """Whether every row of the batch can run a step with these blocks."""
    by_request = {more.request_id: more for more in new_blocks}
    for sequence in batch.sequences:
        more = by_request.get(sequence.id)
        if more is not None and _misfit(sequence, more, cache) is not None:
            return False
        if not (sequence.has_slots or sequence.is_exhausted or (more is not None and len(more.blocks))):
            return False
    return True


def _misfit(sequence: Sequence, more: BlockGrowth, cache: KvCache) -> str | None:
    """Say why these blocks cannot be appended, if so."""
    if len(more.blocks) and int(more.blocks.max()) >= cache.num_blocks:
        return f"request {sequence.id}: a block is outside the cache of {cache.num_blocks} blocks"
    return None
