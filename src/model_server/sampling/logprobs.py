"""Log probabilities of given tokens under raw logits: what `decoder_input_details` shows of a prompt."""

from __future__ import annotations

import torch
from torch import Tensor

# Logits worked on at once: bounds the temporaries of one chunk to some tens of megabytes.
_CHUNK_ELEMENTS = 1 << 23


def prompt_logprobs(logits: Tensor, next_ids: Tensor) -> Tensor:
    """Log-softmax of each row of `logits` [n, vocab] float32 at `next_ids` [n] int64; returns [n] float32.

    Raw: no penalty, temperature or filter has a part in it (TGI `flash_causal_lm.py`). `logits` is left as it is.
    """
    chunk = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    chosen = logits.gather(1, next_ids[:, None]).squeeze(1)
    totals = [torch.logsumexp(part, dim=1) for part in torch.split(logits, chunk)]
    return chosen - torch.cat(totals) if totals else chosen
