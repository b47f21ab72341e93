"""Inputs of a drafter's forward: several rows' tokens from own positions on."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.batch.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Span:
    """A row's tokens from position `first` on, which have slots."""

    sequence: Sequence
    first: int
    ids: list[int]


@dataclass(frozen=True, slots=True)
class SpanInputs:
    """All spans' ids and positions [num_tokens] int64; last: [num_spans] int64, their ends."""

    ids: Tensor
    positions: Tensor
    attention: AttentionMetadata
    last: Tensor


def span_inputs(spans: Rows[Span], device: torch.device) -> SpanInputs:
    counts = np.array([len(span.ids) for span in spans], np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    kv_lengths = np.array([span.first + len(span.ids) for span in spans], np.int32)
    arrays: list[npt.NDArray[np.generic]] = [
        np.concatenate([np.asarray(span.ids, np.int64) for span in spans]),
        np.concatenate([np.arange(span.first, span.first + len(span.ids)) for span in spans]),
        np.concatenate([span.sequence.slots[span.first : span.first + len(span.ids)] for span in spans]),
        _block_tables([span.sequence for span in spans]),
        np.concatenate([np.zeros(1, np.int32), ends]),
        kv_lengths,
        ends.astype(np.int64) - 1,
    ]
    ids, positions, slots, tables, starts, lengths, last = (torch.from_numpy(a).to(device) for a in arrays)
    attention = AttentionMetadata(
        slots=slots,
        block_tables=tables,
        cu_seqlens_q=starts,
        kv_lengths=lengths,
        query_lengths_host=tuple(counts.tolist()),
        kv_lengths_host=tuple(kv_lengths.tolist()),
    )
    return SpanInputs(ids, positions, attention, last)


def counted_places(metadata: AttentionMetadata) -> npt.NDArray[np.int64]:
    """Return tokens' places in the cache, by lengths that the host knows."""
    counts, lengths = metadata.query_lengths_host, metadata.kv_lengths_host
    return np.concatenate([np.arange(n - count, n) for count, n in zip(counts, lengths, strict=True)]).astype(np.int64)


def _block_tables(rows: list[Sequence]) -> npt.NDArray[np.int32]:
    """[num_rows, max_blocks], filled with zeros."""
    tables = np.zeros((len(rows), max(len(row.blocks) for row in rows)), np.int32)
    for row, table in zip(rows, tables, strict=True):
        table[: len(row.blocks)] = row.blocks
    return tables
