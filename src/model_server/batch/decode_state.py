"""The tensors of a decoding batch, kept from step to step.

While the same rows go on, a step rebuilds nothing, and on a GPU copies nothing from the host: positions and lengths
count up where they are, slots follow from the block tables, and the ids are those of the draw before. When rows join,
leave or get blocks, the tables of rows that stay are gathered on the device and what is new comes in one upload.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from model_server.attention.metadata import AttentionMetadata
from model_server.batch.decode_rows import Cells, DecodeRows, Move, places_of
from model_server.batch.sequence import Sequence
from model_server.batch.staging import Staging
from model_server.runner.runner import ModelInputs, RequestState


@dataclass(frozen=True, slots=True)
class Drawn:
    """The newest tokens of some rows, on the device; the host need not have seen them."""

    rows: list[Sequence]
    ids: Tensor  # [num_rows] int64


class DecodeState:
    """Inputs of one batch's decode steps. Not thread-safe: it belongs to the device thread."""

    def __init__(self, device: torch.device, block_size: int, staging: Staging) -> None:
        self._device = device
        self._block_size = block_size
        self._staging = staging
        self._shares_memory = staging.shares_memory
        self._host = DecodeRows(block_size)
        self._is_stale = True
        self._host_slots: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._positions = self._slots = torch.zeros(0, dtype=torch.int64, device=device)
        self._kv_lengths = self._cu_seqlens = torch.zeros(0, dtype=torch.int32, device=device)
        self._tables = torch.zeros(0, 1, dtype=torch.int32, device=device)
        self._query_lengths: tuple[int, ...] = ()
        self._states: tuple[RequestState, ...] = ()

    def goes_on_with(self, rows: list[Sequence]) -> bool:
        """`rows` are those of the last step (the same list), and each may take another: it has a token left to draw and
        a slot to store one in."""
        return rows is self._host.rows and not self._is_stale and self._host.have_room()

    def note_growth(self, sequence: Sequence) -> None:
        """A sequence of the batch got blocks."""
        self._host.note_growth(sequence)

    def note_other_step(self) -> None:
        """A step was launched that this state did not make: rows have moved on."""
        self._is_stale = True

    def release(self, kept: list[Sequence]) -> None:
        """Some rows leave the batch: hold none of them any longer. What is known of those in `kept` is kept."""
        self._host.release(kept)
        self._states = ()

    def next(self, rows: list[Sequence], drawn: Drawn | None) -> ModelInputs:
        """Inputs of a step with one token for each of `rows`, which have slots for it.

        drawn: the newest draw of the batch. Rows whose last token the host has not seen are among its rows.

        The tensors hold until the next call.
        """
        host = self._host
        if rows is host.rows and not self._is_stale:
            host.advance()
            cells = host.new_blocks()
            if self._shares_memory:
                host.advance_slots(self._host_slots)
                self._share_tables()
            else:
                self._advance_on_device(cells)
        else:
            self._rebuild(rows)
        metadata = AttentionMetadata(
            slots=self._slots,
            block_tables=self._tables,
            cu_seqlens_q=self._cu_seqlens,
            kv_lengths=self._kv_lengths,
            query_lengths_host=self._query_lengths,
            kv_lengths_host=tuple(host.kv_lengths.tolist()),
        )
        return ModelInputs(self._ids(rows, drawn), self._positions, metadata, None, self._states)

    def _rebuild(self, rows: list[Sequence]) -> None:
        """Other rows, or the same at other positions."""
        host = self._host
        move = host.take(rows)
        self._is_stale = False
        if move is not None:
            self._query_lengths = (1,) * len(rows)
            self._states = tuple([s.state for s in rows])
            self._cu_seqlens = torch.arange(len(rows) + 1, dtype=torch.int32, device=self._device)
        cells = host.new_blocks()
        if not self._shares_memory:
            self._rebuild_on_device(move, cells)
            return
        self._host_slots = host.slots()
        self._positions, self._slots = torch.from_numpy(host.positions), torch.from_numpy(self._host_slots)
        self._kv_lengths = torch.from_numpy(host.kv_lengths)
        self._share_tables(anew=True)

    def _share_tables(self, *, anew: bool = False) -> None:
        if anew or self._host.tables.shape[1] != self._tables.shape[1]:
            self._tables = torch.from_numpy(self._host.tables)

    def _advance_on_device(self, cells: Cells | None) -> None:
        self._positions.add_(1)
        self._kv_lengths.add_(1)
        if cells is not None:
            places, blocks = self._staging.upload(cells.places, cells.blocks)
            self._write_blocks(places, blocks)
        self._slots = self._slots_on_device()

    def _rebuild_on_device(self, move: Move | None, cells: Cells | None) -> None:
        host = self._host
        moved = () if move is None else (move.kept, move.new)
        changed = () if cells is None else (cells.places, cells.blocks)
        positions, *others = self._staging.upload(host.positions, *moved, *changed)
        if move is not None:
            kept, new = others[:2]
            if len(self._tables):
                self._tables = self._tables.index_select(0, kept).index_fill_(0, new, 0)
            else:
                self._tables = torch.zeros(len(host.rows), host.tables.shape[1], dtype=torch.int32, device=self._device)
        if cells is not None:
            self._write_blocks(others[-2], others[-1])
        self._positions = positions
        self._kv_lengths = (positions + 1).to(torch.int32)
        self._slots = self._slots_on_device()

    def _write_blocks(self, places: Tensor, blocks: Tensor) -> None:
        missing = self._host.tables.shape[1] - self._tables.shape[1]
        if missing:
            self._tables = pad(self._tables, (0, missing))
        self._tables.view(-1).index_copy_(0, places, blocks)

    def _slots_on_device(self) -> Tensor:
        positions, size = self._positions, self._block_size
        blocks = self._tables.gather(1, (positions // size).unsqueeze(1)).squeeze(1)
        return torch.add(positions % size, blocks, alpha=size)

    def _ids(self, rows: list[Sequence], drawn: Drawn | None) -> Tensor:
        """[num_rows] int64: the last token of each row."""
        if drawn is not None and drawn.rows is rows:
            return drawn.ids
        unseen = [i for i, s in enumerate(rows) if s.is_behind]
        known = np.fromiter((s.ids[-1] for s in rows), np.int64, len(rows))
        if not unseen:
            return self._staging.upload(known)[0]
        assert drawn is not None, "a row is behind, but nothing is drawn"
        places = places_of([rows[i] for i in unseen], drawn.rows)
        assert places.min() >= 0, "a row is behind, but not in the last draw"
        if len(unseen) == len(rows):
            return drawn.ids.index_select(0, self._staging.upload(places)[0])
        ids, where, picked = self._staging.upload(known, np.array(unseen, np.int64), places)
        return ids.index_copy_(0, where, drawn.ids.index_select(0, picked))
