"""Log probabilities of given tokens under raw logits, for `decoder_input_details`."""

from __future__ import annotations

import torch
from torch import Tensor

# Logits worked on at once: bounds the temporaries of one chunk to some tens of megabytes.
_CHUNK_ELEMENTS = 1 << 23


def prompt_logprobs(logits: Tensor, next_ids: Tensor) -> Tensor:
    """Return log-softmax of `logits` [n, vocab] at `next_ids` [n], without penalties or filters, as TGI."""
    chunk = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    chosen = logits.gather(1, next_ids[:, None]).squeeze(1)
    totals = [torch.logsumexp(part, dim=1) for part in torch.split(logits, chunk)]
    return chosen - torch.cat(totals) if totals else chosen
