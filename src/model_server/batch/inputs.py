"""From a list of sequences to the tensors of one forward: a pure function of visible state, built anew each step."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.batch.sequence import Sequence
from model_server.runner import ModelInputs


@dataclass(frozen=True, slots=True)
class StepInputs:
    """`model` goes to the runner. `last_rows`: for each sequence the row of the logits that its token is drawn from;
    None when the logits hold exactly those rows."""

    model: ModelInputs
    last_rows: Tensor | None  # [num_sequences] int64


def decode_inputs(
    sequences: Rows[Sequence],
    block_tables: npt.NDArray[np.int32],
    drawn_ids: Tensor | None,
    device: torch.device,
) -> StepInputs:
    """One token for each sequence.

    drawn_ids: [num_sequences] int64 on the device: the tokens of a step whose ids the host has not seen yet; None when
    the host knows them all.
    """
    count = len(sequences)
    positions = np.fromiter((s.cache_length for s in sequences), np.int64, count)
    slots = np.fromiter((s.slots[s.cache_length] for s in sequences), np.int64, count)
    if drawn_ids is None:
        drawn_ids = _to_device(np.fromiter((s.ids[-1] for s in sequences), np.int64, count), device)
    kv_lengths = (positions + 1).astype(np.int32)
    metadata = AttentionMetadata(
        slots=_to_device(slots, device),
        block_tables=_to_device(block_tables, device),
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32, device=device),
        kv_lengths=_to_device(kv_lengths, device),
        query_lengths_host=(1,) * count,
        kv_lengths_host=tuple(kv_lengths.tolist()),
    )
    inputs = ModelInputs(
        input_ids=drawn_ids, positions=_to_device(positions, device), attention=metadata, logit_rows=None
    )
    return StepInputs(inputs, last_rows=None)


def prefill_inputs(sequences: Rows[Sequence], block_tables: npt.NDArray[np.int32], device: torch.device) -> StepInputs:
    """All prompt tokens that are not in the cache yet. Logits are asked for each sequence's last token, and for all
    its tokens where prompt logprobs are wanted."""
    spans = [(s.cache_length, s.cache_length + s.input_length) for s in sequences]
    ids = np.concatenate([np.asarray(s.ids[a:b], np.int64) for s, (a, b) in zip(sequences, spans, strict=True)])
    positions = np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in spans])
    slots = np.concatenate([s.slots[a:b] for s, (a, b) in zip(sequences, spans, strict=True)])
    query_lengths = np.array([b - a for a, b in spans], np.int32)
    kv_lengths = np.array([b for _, b in spans], np.int32)
    cu_seqlens = np.concatenate([np.zeros(1, np.int32), np.cumsum(query_lengths, dtype=np.int32)])
    logit_rows, last_rows = _logit_rows(sequences, cu_seqlens)
    metadata = AttentionMetadata(
        slots=_to_device(slots, device),
        block_tables=_to_device(block_tables, device),
        cu_seqlens_q=_to_device(cu_seqlens, device),
        kv_lengths=_to_device(kv_lengths, device),
        query_lengths_host=tuple(query_lengths.tolist()),
        kv_lengths_host=tuple(kv_lengths.tolist()),
    )
    inputs = ModelInputs(
        input_ids=_to_device(ids, device),
        positions=_to_device(positions, device),
        attention=metadata,
        logit_rows=_to_device(logit_rows, device),
    )
    return StepInputs(inputs, last_rows=None if last_rows is None else _to_device(last_rows, device))


def _logit_rows(
    sequences: Rows[Sequence], cu_seqlens: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
    """Token rows whose logits are wanted, and where among them each sequence's last one is (None: just those)."""
    ends = cu_seqlens[1:].astype(np.int64) - 1
    if not any(s.prefill_logprobs for s in sequences):
        return ends, None
    wanted = [
        np.arange(cu_seqlens[i], cu_seqlens[i + 1], dtype=np.int64) if s.prefill_logprobs else ends[i : i + 1]
        for i, s in enumerate(sequences)
    ]
    return np.concatenate(wanted), np.cumsum([len(w) for w in wanted]).astype(np.int64) - 1


def _to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
