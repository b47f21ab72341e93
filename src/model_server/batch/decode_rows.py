"""The host's own account of a decoding batch: where each row stands, and which blocks it has."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model_server.batch.sequence import Sequence

# Tables get wider by so many entries at once: growth by single blocks must not make new ones each time.
_SPARE_WIDTH = 16

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cells:
    """Changed entries of the tables: where they stand in the flattened tables, and the blocks."""

    places: Indices
    blocks: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Move:
    """How the rows of a batch follow from those before. kept: for each row, where it stood, 0 for a new one; new: the
    places of new rows."""

    kept: Indices
    new: Indices


class DecodeRows:
    """Arrays with one entry for each row. `positions` are those of the tokens of the current step."""

    def __init__(self, block_size: int) -> None:
        self.rows: list[Sequence] = []
        self.positions = np.zeros(0, np.int64)
        self.kv_lengths = np.zeros(0, np.int32)
        self.tables = np.zeros((0, _SPARE_WIDTH), np.int32)  # [num_rows, width], 0 behind a row's blocks
        self._block_size = block_size
        self._table_lengths = np.zeros(0, np.int64)
        self._last_positions = np.zeros(0, np.int64)  # the last that a row has a slot and a token for
        self._place: dict[int, int] = {}  # by id() of a row
        self._grown: list[int] = []
        self._steps_left = 0

    def have_room(self) -> bool:
        """Every row may take one more step."""
        if self._steps_left <= 0:
            self._steps_left = int((self._last_positions - self.positions).min())
        return self._steps_left > 0

    def note_growth(self, sequence: Sequence) -> None:
        """A sequence, perhaps one of the rows, got blocks."""
        place = self._place.get(id(sequence))
        if place is not None:
            self._grown.append(place)
            self._last_positions[place] = _last_position(sequence)
            self._steps_left = 0

    def release(self, kept: list[Sequence]) -> None:
        """Hold no row any longer; tables stay for those of `kept`."""
        self._place = {id(s): self._place[id(s)] for s in kept if id(s) in self._place}
        self.rows = []

    def advance(self) -> None:
        """The next step of the same rows."""
        self.positions += 1
        self.kv_lengths += 1
        self._steps_left -= 1

    def slots(self) -> Indices:
        """Where the tokens of the current step are stored."""
        blocks = self.tables[np.arange(len(self.rows)), self.positions // self._block_size]
        return blocks.astype(np.int64) * self._block_size + self.positions % self._block_size

    def advance_slots(self, slots: Indices) -> None:
        """From the slots of the step before to those of this one, in place."""
        slots += 1
        offsets = self.positions % self._block_size
        if not offsets.all():
            entered = np.flatnonzero(offsets == 0)
            blocks = self.tables[entered, self.positions[entered] // self._block_size]
            slots[entered] = blocks.astype(np.int64) * self._block_size

    def take(self, rows: list[Sequence]) -> Move | None:
        """These rows, where they now stand, in place of those before; None: they are the same, only their positions are
        new. Tables of kept rows stay, those of new rows are empty until `new_blocks`."""
        count = len(rows)
        move = None
        if rows is not self.rows:
            source = np.fromiter((self._place.get(id(s), -1) for s in rows), np.int64, count)
            move = Move(np.maximum(source, 0), np.flatnonzero(source < 0))
            if len(self.tables):
                self.tables, self._table_lengths = self.tables[move.kept], self._table_lengths[move.kept]
            else:
                self.tables = np.zeros((count, self.tables.shape[1]), np.int32)
                self._table_lengths = np.zeros(count, np.int64)
            self.tables[move.new] = 0
            self._table_lengths[move.new] = 0
            self.rows = rows
            self._place = {id(s): i for i, s in enumerate(rows)}
        self._grown = list(range(count))
        self.positions = np.fromiter((s.cache_length for s in rows), np.int64, count)
        self.kv_lengths = (self.positions + 1).astype(np.int32)
        self._last_positions = np.fromiter(map(_last_position, rows), np.int64, count)
        self._steps_left = 0
        return move

    def new_blocks(self) -> Cells | None:
        """Bring the tables up to date, wider if need be; what changed in them."""
        if not self._grown:
            return None
        grown = [p for p in self._grown if len(self.rows[p].blocks) > self._table_lengths[p]]
        self._grown = []
        if not grown:
            return None
        self._widen(max(len(self.rows[p].blocks) for p in grown))
        width = self.tables.shape[1]
        places: list[Indices] = []
        blocks: list[npt.NDArray[np.int32]] = []
        for place in grown:
            known, table = int(self._table_lengths[place]), self.rows[place].blocks
            added = table[known:]
            if len(added):  # it may be listed twice
                self.tables[place, known : len(table)] = added
                self._table_lengths[place] = len(table)
                places.append(np.arange(place * width + known, place * width + len(table)))
                blocks.append(added)
        return Cells(np.concatenate(places), np.concatenate(blocks).astype(np.int32, copy=False))

    def _widen(self, width: int) -> None:
        missing = width - self.tables.shape[1]
        if missing > 0:
            missing += max(_SPARE_WIDTH, self.tables.shape[1] // 4)
            self.tables = np.pad(self.tables, ((0, 0), (0, missing)))


def places_of(rows: Rows[Sequence], among: Rows[Sequence]) -> Indices:
    """Where each of `rows` stands in `among`; -1: nowhere."""
    place = {id(s): i for i, s in enumerate(among)}
    return np.fromiter((place.get(id(s), -1) for s in rows), np.int64, len(rows))


def _last_position(sequence: Sequence) -> int:
    tokens_left = sequence.max_new_tokens - sequence.num_sampled
    return min(len(sequence.slots), sequence.cache_length + tokens_left) - 1
