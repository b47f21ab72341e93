"""The hidden states that enter a layer, of all samples, in files: one is read while the next layer's is written."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

# Those of the calibration, of the held-out samples, and of these again as the model gives them that is not quantized.
GROUPS = ("calibration", "held_out", "plain")


class Streams:
    """What enters one layer. Sequences in each group are numbered from 0."""

    def __init__(self, path: Path, counts: tuple[int, int, int], length: int, width: int, dtype: torch.dtype) -> None:
        """counts: of the sequences in each of `GROUPS`. The file is made if it is not there."""
        self._first = dict(zip(GROUPS, (0, counts[0], counts[0] + counts[1]), strict=True))
        shape = (sum(counts), length, width)
        # Mapped: what does not fit into memory stays in the file.
        self._states = torch.from_file(str(path), shared=True, size=shape[0] * length * width, dtype=dtype).view(shape)

    def get(self, group: str, number: int) -> Tensor:
        """[length, width]"""
        return self._states[self._first[group] + number]

    def put(self, group: str, number: int, states: Tensor) -> None:
        self._states[self._first[group] + number].copy_(states)
