"""The rows of a batch whose tokens the kernels choose (`kernels.sampling`); all others go by plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model_server.memory.transfer import upload
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.row import SamplingRow

_KNOWN = frozenset({"top_k", "top_p", "min_p"})
"""The filters that the kernels apply."""


def fits(row: SamplingRow) -> bool:
    """Whether the kernels know all that a row asks for; top tokens they do not. Other rows have no influence."""
    return row.parameters.filters <= _KNOWN and row.top_n_tokens == 0


class KernelRows:
    """Some rows of one batch composition, laid out on the device, where their random numbers are made too."""

    __slots__ = ("_bits", "_taken")

    def __init__(
        self, rows: Sequence[SamplingRow], numbers: Sequence[int], vocab_size: int, bits: int, device: torch.device
    ) -> None:
        """`numbers`: which rows of the batch these are; bits: `categorical.weight_bits`. Needs kernels."""
        from model_server.kernels.sampling.sampling import SampledRows

        order = sorted(range(len(rows)), key=lambda place: _kind(rows[place].parameters))
        given = [rows[place].parameters for place in order]
        kinds = [_kind(p) for p in given]

        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return upload(torch.tensor(values, dtype=dtype), device)

        self._bits = bits
        self._taken = SampledRows(
            rows=column([numbers[place] for place in order], torch.int32),
            seeds=column([p.seed - ((p.seed >> 63) << 64) for p in given], torch.int64),
            counts=column([rows[place].num_generated for place in order], torch.int64),
            temperature=column([p.temperature for p in given], torch.float32),
            top_k=column([p.largest_rank(vocab_size) for p in given], torch.int32),
            dropped=column([p.dropped_mass for p in given], torch.float64),
            min_p=column([p.log_min_p for p in given], torch.float32),
            num_greedy=kinds.count(0),
            num_unfiltered=kinds.count(1),
        )

    def choose(self, logits: Tensor, ids: Tensor, packed: Tensor) -> None:
        """One token for each of the rows, see `kernels.sampling.sample`."""
        from model_server.kernels.sampling.sampling import sample

        sample(logits, self._taken, self._bits, ids, packed)


def _kind(parameters: SamplingParameters) -> int:
    """0: greedy, 1: sampled from the whole row, 2: filtered."""
    return 2 if parameters.filters else int(parameters.samples)
