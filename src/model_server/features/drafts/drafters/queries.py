"""Rows whose lengths only the device knows, and queries as in steps of single tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowsAt:
    """The rows of a window before it is computed."""

    # [num_rows] int64, as start, its place in the cache, and limit, the end of the row's slots.
    newest: Tensor
    start: Tensor
    limit: Tensor
    # [num_rows, capacity] int32, `start` + 1 of the row.
    history: Tensor
    tables: Tensor
    block_size: int
    # The host's bound of `start`; `limits`: of `limit`.
    longest: Indices
    limits: Indices
    # The host knows `start`: its memory is the device's.
    is_known: bool = False

    @property
    def count(self) -> int:
        return len(self.longest)


def single_queries(
    rows: RowsAt, at: Tensor, inside: Tensor, first: int, *, joined: bool = False
) -> tuple[Tensor, AttentionMetadata]:
    """Make queries at places `at` [num_rows, n], those not `inside` being padding in the reserved block.

    Args:
        first: How far `at` begins behind `start`.
        joined: Padding is behind each row's queries, which attention may join.

    Returns:
        Places [num_rows, n], and metadata of num_rows * n queries.
    """
    size, num_places = rows.block_size, at.shape[1]
    stored = at.masked_fill(~inside, 0)
    blocks = rows.tables.gather(1, stored // size)
    slots = torch.add(stored % size, blocks, alpha=size).masked_fill(~inside, 0)
    spread = rows.tables if num_places == 1 else rows.tables.repeat_interleave(num_places, 0)
    count = rows.count * num_places
    if rows.is_known:
        lengths = stored.numpy() + 1
    else:
        bounds = rows.longest[:, None] + 1 + first + np.arange(num_places)
        lengths = np.clip(bounds, 1, np.maximum(rows.limits, 1)[:, None])
    metadata = AttentionMetadata(
        slots=slots.view(-1),
        block_tables=spread.masked_fill(~inside.reshape(-1, 1), 0),
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32, device=at.device),
        kv_lengths=(stored + 1).view(-1).to(torch.int32),
        query_lengths_host=(1,) * count,
        kv_lengths_host=tuple(lengths.reshape(-1).tolist()),
        places=num_places if joined else 1,
    )
    return stored, metadata


def counted_places(metadata: AttentionMetadata) -> npt.NDArray[np.int64]:
    """Return tokens' places in the cache, by lengths that the host knows."""
    counts, lengths = metadata.query_lengths_host, metadata.kv_lengths_host
    return np.concatenate([np.arange(n - count, n) for count, n in zip(counts, lengths, strict=True)]).astype(np.int64)
