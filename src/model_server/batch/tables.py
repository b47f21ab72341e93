"""The block tables of a running batch, on host and device.

Entries of staying rows are gathered on the device; new ones come with the step's upload.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from model_server.batch.sequence import Sequence

# Tables get wider by at least this many entries: single further blocks must not make new tables each time.
_SPARE_WIDTH = 16

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TableChange:
    """How a step's tables follow from the last ones."""

    # For each row its place before, 0 for new ones; None as `new`: the same rows.
    kept: Indices | None = None
    new: Indices | None = None
    # Changed entries of the flattened tables; None: none.
    entries: Indices | None = None
    blocks: npt.NDArray[np.int32] | None = None

    @property
    def arrays(self) -> tuple[npt.NDArray[np.generic], ...]:
        """What `BlockTables.apply` needs on the device."""
        return tuple(a for a in (self.kept, self.new, self.entries, self.blocks) if a is not None)


_UNCHANGED = TableChange()


class BlockTables:
    """Tables [num_rows, width] int32 on both: each row's blocks, then 0 (the reserved block).

    A step calls `follow`, uploads the change's arrays, and calls `apply`.
    """

    def __init__(self, device: torch.device, *, shares_memory: bool) -> None:
        self.rows: list[Sequence] = []
        self.host = np.zeros((0, _SPARE_WIDTH), np.int32)
        self.device = torch.zeros(0, _SPARE_WIDTH, dtype=torch.int32, device=device)
        self.num_slots = np.zeros(0, np.int64)
        self._shares_memory = shares_memory
        self._shared = self.host
        self._lengths = np.zeros(0, np.int64)  # blocks of each row that are in `host`
        self._position: dict[int, int] = {}  # by id() of a row
        self._extended: list[int] = []

    def extend(self, sequence: Sequence, blocks: Indices, block_size: int) -> None:
        """Append blocks to a sequence, among the rows or not."""
        sequence.extend_blocks(blocks, block_size)
        row = self._position.get(id(sequence))
        if row is not None:
            self._extended.append(row)
            self.num_slots[row] = len(sequence.slots)

    def release(self, kept: list[Sequence]) -> None:
        """Forget rows that leave; entries of `kept` stay."""
        self._position = {id(s): self._position[id(s)] for s in kept if id(s) in self._position}
        self.rows = []

    def follow(self, rows: list[Sequence]) -> TableChange:
        """Bring `host` to these rows, and return the change."""
        kept = new = None
        if rows is not self.rows:
            kept, new = self._replace_rows(rows)
        elif not self._extended:
            return _UNCHANGED
        entries, blocks = self._new_entries()
        return TableChange(kept, new, entries, blocks)

    def apply(self, change: TableChange, uploaded: Rows[Tensor]) -> None:
        """Bring `device` to `host`, with the change's uploaded arrays."""
        if self._shares_memory:
            if self._shared is not self.host:
                self.device, self._shared = torch.from_numpy(self.host), self.host
            return
        if change.kept is not None:
            kept, new, *uploaded = uploaded
            if len(self.device):
                self.device = self.device.index_select(0, kept).index_fill_(0, new, 0)
            else:
                self.device = self.device.new_zeros(len(change.kept), self.device.shape[1])
        missing = self.host.shape[1] - self.device.shape[1]
        if missing:
            self.device = pad(self.device, (0, missing))
        if change.entries is not None:
            entries, blocks = uploaded
            self.device.view(-1).index_copy_(0, entries, blocks)

    def _replace_rows(self, rows: list[Sequence]) -> tuple[Indices, Indices]:
        """Replace rows: kept entries stay, new rows are empty."""
        source = positions_of(rows, self._position)
        kept, new = np.maximum(source, 0), np.flatnonzero(source < 0)
        if len(self.host):
            self.host, self._lengths = self.host[kept], self._lengths[kept]
        else:
            self.host = np.zeros((len(rows), self.host.shape[1]), np.int32)
            self._lengths = np.zeros(len(rows), np.int64)
        self.host[new] = 0
        self._lengths[new] = 0
        self.rows = rows
        self.num_slots = np.fromiter((len(s.slots) for s in rows), np.int64, len(rows))
        self._position = {id(s): i for i, s in enumerate(rows)}
        self._extended = list(range(len(rows)))
        return kept, new

    def _new_entries(self) -> tuple[Indices, npt.NDArray[np.int32]] | tuple[None, None]:
        """Write blocks that `host` lacks; return entries and blocks."""
        rows, self._extended = self._extended, []
        rows = [row for row in rows if len(self.rows[row].blocks) > self._lengths[row]]
        if not rows:
            return None, None
        self._widen(max(len(self.rows[row].blocks) for row in rows))
        width = self.host.shape[1]
        entries: list[Indices] = []
        blocks: list[npt.NDArray[np.int32]] = []
        for row in rows:
            known, table = int(self._lengths[row]), self.rows[row].blocks
            if len(table) > known:  # a row may be listed twice
                self.host[row, known : len(table)] = table[known:]
                self._lengths[row] = len(table)
                entries.append(np.arange(row * width + known, row * width + len(table)))
                blocks.append(table[known:])
        return np.concatenate(entries), np.concatenate(blocks)

    def _widen(self, width: int) -> None:
        missing = width - self.host.shape[1]
        if missing > 0:
            missing += max(_SPARE_WIDTH, self.host.shape[1] // 4)
            self.host = np.pad(self.host, ((0, 0), (0, missing)))


def positions_of(rows: Rows[Sequence], position: dict[int, int]) -> Indices:
    """Return the place of each of `rows` by id(); -1: nowhere."""
    return np.fromiter((position.get(id(s), -1) for s in rows), np.int64, len(rows))
