"""Texts as the rows of one forward, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from model_server.pooling.items import Item


@dataclass(frozen=True)
class FlatBatch:
    """Tokens [num_tokens] int64 on the device, and the lengths of their texts."""

    input_ids: Tensor
    # None: all 0.
    token_types: Tensor | None
    lengths: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, items: Sequence[Item], device: torch.device, *, typed: bool) -> FlatBatch:
        """Join items; `typed` models tell a pair's texts apart."""
        lengths = tuple(len(item.input_ids) for item in items)
        ids = np.concatenate([item.input_ids for item in items]).astype(np.int64)
        types = None
        if typed and any(item.second_from for item in items):
            types = np.zeros(len(ids), dtype=np.int64)
            start = 0
            for item, length in zip(items, lengths, strict=True):
                if item.second_from:
                    types[start + item.second_from : start + length] = 1
                start += length
        return cls(
            input_ids=torch.from_numpy(ids).to(device),
            token_types=None if types is None else torch.from_numpy(types).to(device),
            lengths=lengths,
            device=device,
        )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return where each text begins, and the end."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]

    @cached_property
    def host_positions(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return each token's position in its text."""
        starts = np.repeat(np.array(self.starts[:-1]), self.lengths)
        positions: np.ndarray[tuple[int], np.dtype[np.int64]] = np.arange(self.num_tokens, dtype=np.int64) - starts
        return positions

    def rows(self, hidden: Tensor) -> list[Tensor]:
        """`hidden` [num_tokens, n] by text: views."""
        return list(torch.split(hidden, list(self.lengths)))
