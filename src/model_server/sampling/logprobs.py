"""Log probabilities of a prompt's tokens under raw logits: what `decoder_input_details` and `echo` show of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.memory.transfer import download, upload
from model_server.sampling.filters import largest

# Logits worked on at once: bounds the temporaries of one chunk to some tens of megabytes.
_CHUNK_ELEMENTS = 1 << 23


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of successive prompt tokens, on their way to the host."""

    chosen: Tensor  # [n] float32: log probabilities of the tokens
    top_ids: Tensor  # [n, count]: the likeliest tokens at their places, the best first
    top: Tensor  # [n, count]: their log probabilities


def prompt_scores(logits: Tensor, next_ids: list[int], count: int) -> PromptScores:
    """Return log-softmax of `logits` [n, vocab] at `next_ids` and its `count` largest, without penalties, as TGI."""
    width = logits.shape[1]
    count = min(count, width)
    ids = upload(torch.tensor(next_ids, dtype=torch.int64), logits.device)
    chosen = logits.gather(1, ids[:, None])
    # Not zero rows, of which torch makes no parts.
    parts = torch.split(logits, max(1, _CHUNK_ELEMENTS // width)) if len(logits) else (logits,)
    total = torch.cat([torch.logsumexp(part, dim=1, keepdim=True) for part in parts])
    tops = [largest(part, count) if count and len(part) else _none(part, count) for part in parts]
    values, top_ids = (torch.cat(one) for one in zip(*tops, strict=True))
    return PromptScores(download((chosen - total).squeeze(1)), download(top_ids), download(values - total))


def _none(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values = logits.new_empty(len(logits), count)
    return values, values.long()
