"""Tensors of a forward with prompts, from a list of sequences; decode steps keep theirs in `batch.decode_state`."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.batch.newest import NewestTokens, places_of
from model_server.batch.sequence import Sequence
from model_server.batch.tables import BlockTables
from model_server.memory.transfer import Staging
from model_server.runner.runner import ModelInputs


@dataclass(frozen=True, slots=True)
class Scored:
    """Logits rows from `first_row` that score a prompt's tokens behind `position`."""

    sequence: Sequence
    position: int
    first_row: int
    count: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a forward and of its sampling."""

    model: ModelInputs
    # Logits row of each sequence that samples; None: just those rows. `sampled_host`: on the host.
    sampled_rows: Tensor | None = None  # [num_sampling] int64
    scored: tuple[Scored, ...] = ()
    sampled_host: npt.NDArray[np.int64] | None = None


def ragged_inputs(
    sequences: list[Sequence], tables: BlockTables, staging: Staging, newest: NewestTokens | None
) -> StepInputs:
    """Lay out the next `input_length` tokens of each sequence: prompts, chunks, decode rows.

    Logits are asked for last tokens that sample, and for scored prompt tokens.

    Args:
        newest: The batch's last sampled tokens, for rows whose token the host has not seen.
    """
    spans = [(s.cache_length, s.cache_length + s.input_length) for s in sequences]
    unseen = [i for i, s in enumerate(sequences) if s.has_unseen]
    ids = np.concatenate(
        [np.asarray([0] if s.has_unseen else s.ids[a:b], np.int64) for s, (a, b) in zip(sequences, spans, strict=True)]
    )
    positions = np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in spans])
    slots = np.concatenate([s.slots[a:b] for s, (a, b) in zip(sequences, spans, strict=True)])
    query_lengths = np.array([b - a for a, b in spans], np.int32)
    kv_lengths = np.array([b for _, b in spans], np.int32)
    cu_seqlens = np.concatenate([np.zeros(1, np.int32), np.cumsum(query_lengths, dtype=np.int32)])
    logit_rows, sampled_rows, scored = _logit_rows(sequences, cu_seqlens.tolist())
    change = tables.follow(sequences)
    arrays = (ids, positions, logit_rows, slots, cu_seqlens, kv_lengths)
    picked = () if sampled_rows is None else (sampled_rows,)
    filled = (
        () if not unseen else (cu_seqlens[unseen].astype(np.int64), places_of([sequences[i] for i in unseen], newest))
    )
    uploaded = staging.upload(*arrays, *picked, *filled, *change.arrays)
    tables.apply(change, uploaded[len(arrays) + len(picked) + len(filled) :])
    if newest is not None and unseen:
        to, source = uploaded[len(arrays) + len(picked) :][:2]
        uploaded[0].index_copy_(0, to, newest.ids.index_select(0, source))
    single_prompts = np.array([s.is_prefilling and s.input_length == 1 for s in sequences], np.uint8)
    metadata = AttentionMetadata(
        slots=uploaded[3],
        block_tables=tables.device,
        cu_seqlens_q=uploaded[4],
        kv_lengths=uploaded[5],
        query_lengths_host=tuple(query_lengths.tolist()),
        kv_lengths_host=tuple(kv_lengths.tolist()),
        single_prompts=single_prompts if single_prompts.any() else None,
    )
    inputs = ModelInputs(
        input_ids=uploaded[0],
        positions=uploaded[1],
        attention=metadata,
        logit_rows=uploaded[2],
        logit_rows_host=logit_rows,
        states=tuple([s.state for s in sequences]),
    )
    return StepInputs(inputs, None if sampled_rows is None else uploaded[6], scored, sampled_rows)


def _logit_rows(
    sequences: Rows[Sequence], starts: list[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None, tuple[Scored, ...]]:
    """Return rows with logits (at least one), the sampled ones among them, and the scoring ones."""
    wanted: list[int] = []
    sampled: list[int] = []
    scored: list[Scored] = []
    for sequence, start, stop in zip(sequences, starts, starts[1:], strict=False):
        count = min(stop - start, sequence.prompt_length - 1 - sequence.cache_length)
        if sequence.prefill_logprobs and count > 0:
            scored.append(Scored(sequence, sequence.cache_length, len(wanted), count))
            wanted.extend(range(start, start + count))
        if sequence.samples:
            sampled.append(len(wanted))
            wanted.append(stop - 1)
    if not wanted:
        return np.zeros(1, np.int64), np.zeros(0, np.int64), ()
    rows = np.array(wanted, np.int64)
    return rows, None if len(sampled) == len(wanted) else np.array(sampled, np.int64), tuple(scored)
