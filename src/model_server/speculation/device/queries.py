"""Rows whose lengths only the device knows, and queries of theirs that are computed as in a step of single tokens."""

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
    """The rows of a window before it is computed.

    newest, start, limit: [num_rows] int64, the newest token, its place in the cache, whose K/V are not written, and the
    end of the row's slots. history: [num_rows, capacity] int32, of which the first `start` + 1 are of the row. tables:
    [num_rows, width] int32. longest, limits: [num_rows], the host's bound of `start`, and `limit` there.
    """

    newest: Tensor
    start: Tensor
    limit: Tensor
    history: Tensor
    tables: Tensor
    block_size: int
    longest: Indices
    limits: Indices

    @property
    def count(self) -> int:
        return len(self.longest)


def single_queries(
    rows: RowsAt, at: Tensor, inside: Tensor, first: int, *, joined: bool = False
) -> tuple[Tensor, AttentionMetadata]:
    """Queries at the places `at` [num_rows, n] of the cache, each a sequence of its own, of which those that are not
    `inside` are padding: place 0 of the reserved block. first: how far `at` begins behind `start`. joined: padding is
    behind the queries of each row alone, so that attention may compute them together.

    The places [num_rows, n], 0 for padding, and the metadata of num_rows * n queries.
    """
    size, num_places = rows.block_size, at.shape[1]
    stored = at.masked_fill(~inside, 0)
    blocks = rows.tables.gather(1, stored // size)
    slots = torch.add(stored % size, blocks, alpha=size).masked_fill(~inside, 0)
    spread = rows.tables if num_places == 1 else rows.tables.repeat_interleave(num_places, 0)
    count = rows.count * num_places
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
