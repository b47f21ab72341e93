"""The greedy choice in one pass over the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from model_server.cpp.library import prepared, without_gil_release

# Logits that are gone through in some ten microseconds.
FEW = 2**18


def greedy(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's first largest logit: id, logit, and the sum of e^(logit - largest), each [n, 1].

    Args:
        logits: [n, vocab] float32; a row with NaN has NaN as its largest.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count, width = logits.shape
    ids = torch.empty(count, 1, dtype=torch.int64)
    peaks, totals = torch.empty(2, count, 1, dtype=torch.float32)
    operators = without_gil_release() if logits.numel() <= FEW else prepared()
    operators.cpp_greedy(
        logits.data_ptr(), count, width, logits.stride(0), ids.data_ptr(), peaks.data_ptr(), totals.data_ptr()
    )
    return ids, peaks, totals
