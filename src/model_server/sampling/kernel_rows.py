"""Rows whose tokens the kernels choose (`kernels.sampling`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from model_server.memory.transfer import Staging
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.row import SamplingRow

_KNOWN = frozenset({"top_k", "top_p", "min_p"})
"""The filters that the kernels apply."""


def fits(row: SamplingRow) -> bool:
    """Whether kernels know all that a row needs, which top tokens are not."""
    return row.parameters.filters <= _KNOWN and row.top_n_tokens == 0


# What a row's parameters come to, in the kernels' words; `kind` decides the order.
_RECORD = np.dtype(
    [
        ("kind", np.int8), ("seeds", np.int64), ("temperature", np.float32), ("top_k", np.int32),
        ("dropped", np.float64), ("min_p", np.float32),
    ]
)  # fmt: skip
_COLUMNS = ("seeds", "temperature", "top_k", "dropped", "min_p")


class KernelRows:
    """Some rows on the device, with their random numbers."""

    __slots__ = ("_bits", "_places", "_records", "_taken")

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        numbers: Sequence[int],
        vocab_size: int,
        bits: int,
        staging: Staging,
        previous: KernelRows | None = None,
    ) -> None:
        """Lay out rows.

        Args:
            numbers: In the batch.
            bits: `categorical.weight_bits`.
            previous: Of the composition before, for known rows.
        """
        from model_server.kernels.sampling.sampling import SampledRows

        known = {} if previous is None else previous._places
        places = np.fromiter((known.get(row, -1) for row in rows), np.int64, len(rows))
        records = np.empty(len(rows), _RECORD)
        if previous is not None:
            kept = places >= 0
            records[kept] = previous._records[places[kept]]
        for place in (places < 0).nonzero()[0].tolist():
            records[place] = _record(rows[place].parameters, vocab_size)
        order = np.argsort(records["kind"], kind="stable")
        records = records[order]
        counts = np.fromiter((row.num_generated for row in rows), np.int64, len(rows))
        columns = {name: records[name].copy() for name in _COLUMNS}
        columns |= {"rows": np.array(numbers, np.int32)[order], "counts": counts[order]}
        kinds = np.bincount(records["kind"], minlength=3)
        self._bits = bits
        self._records: npt.NDArray[np.void] = records
        self._places: dict[SamplingRow, int] = {rows[place]: number for number, place in enumerate(order.tolist())}
        self._taken = SampledRows(
            **dict(zip(columns, staging.upload(*columns.values()), strict=True)),
            num_greedy=int(kinds[0]),
            num_unfiltered=int(kinds[1]),
        )

    def count_from(self, generated: Tensor) -> None:
        """Take the rows' generated counts from the device, [num_rows] int64."""
        self._taken.counts.copy_(generated.index_select(0, self._taken.rows))

    def choose(self, logits: Tensor, ids: Tensor, packed: Tensor) -> None:
        """Choose the rows' tokens (`kernels.sampling.sample`)."""
        from model_server.kernels.sampling.sampling import sample

        sample(logits, self._taken, self._bits, ids, packed)


def _record(parameters: SamplingParameters, vocab_size: int) -> tuple[float, ...]:
    """The fields of `_RECORD`."""
    seed = parameters.seed - ((parameters.seed >> 63) << 64)  # the same bits, with a sign
    return (
        _kind(parameters),
        seed,
        parameters.temperature,
        parameters.largest_rank(vocab_size),
        parameters.dropped_mass,
        parameters.log_min_p,
    )


def _kind(parameters: SamplingParameters) -> int:
    """Return 0: greedy, 1: whole row, 2: filtered."""
    return 2 if parameters.filters else int(parameters.samples)
