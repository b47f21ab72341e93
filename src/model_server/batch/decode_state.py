"""The tensors of a decoding batch, kept from step to step.

While rows continue, nothing is rebuilt or copied: positions count up in place, slots follow from the block tables, ids
are the last sampled. Changes come in one upload (`batch.tables`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.batch.advance import advance_on
from model_server.batch.feature import Extension, ModelFeature
from model_server.batch.newest import NewestTokens, places_of
from model_server.batch.sequence import Sequence
from model_server.batch.tables import BlockTables
from model_server.memory.transfer import Staging
from model_server.runner.runner import ModelInputs, RequestState

Indices = npt.NDArray[np.int64]


class DecodeState:
    """Inputs of one batch's decode steps, on the device thread.

    The host counts positions along, and for how many steps all rows have slots and tokens.
    """

    def __init__(
        self, device: torch.device, block_size: int, staging: Staging, features: tuple[ModelFeature, ...] = ()
    ) -> None:
        self.tables = BlockTables(device, shares_memory=staging.shares_memory)
        # Of all steps of the batch.
        self.extension = Extension(features)
        self._device = device
        self._block_size = block_size
        self._staging = staging
        self._shares_memory = staging.shares_memory
        self._advance_on_device = advance_on(device)
        self._rows: list[Sequence] = []
        self._is_stale = True
        self._steps_left = 0
        self._lengths: Indices = np.zeros(0, np.int64)  # the most tokens of each row that are ever stored
        self._host_positions: Indices = np.zeros(0, np.int64)
        self._host_kv_lengths: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._host_slots: Indices = np.zeros(0, np.int64)
        self._host_offset_positions: Indices | None = None  # positions of the tokens, where they are not their places
        self._offset_positions: Tensor | None = None
        self._positions = self._slots = torch.zeros(0, dtype=torch.int64, device=device)
        self._kv_lengths = self._cu_seqlens = torch.zeros(0, dtype=torch.int32, device=device)
        self._query_lengths: tuple[int, ...] = ()
        self._states: tuple[RequestState, ...] = ()

    @property
    def has_run(self) -> bool:
        """A decode step was taken."""
        return len(self._host_positions) > 0

    def repeats(self, rows: list[Sequence]) -> bool:
        """Whether `rows` are the last step's list, and each has a token and a slot left."""
        if rows is not self._rows or self._is_stale:
            return False
        if self._steps_left <= 0:
            lengths = np.minimum(self._lengths, self.tables.num_slots)
            self._steps_left = int((lengths - 1 - self._host_positions).min())
        return self._steps_left > 0

    def note_other_step(self) -> None:
        """Note that rows moved on in a step not made here."""
        self._is_stale = True

    def release(self, kept: list[Sequence]) -> None:
        """Forget the rows that leave, and keep what is known of `kept`."""
        self.tables.release(kept)
        self.extension.release()
        self._rows = []
        self._states = ()

    def next(self, rows: list[Sequence], newest: NewestTokens | None) -> ModelInputs:
        """Make the inputs of one token for each of `rows`; valid until the next call.

        Args:
            newest: The batch's last sampled tokens, for rows whose token the host has not seen.
        """
        if rows is self._rows and not self._is_stale:
            self._advance(rows)
        else:
            self._rebuild(rows)
        metadata = AttentionMetadata(
            slots=self._slots,
            block_tables=self.tables.device,
            cu_seqlens_q=self._cu_seqlens,
            kv_lengths=self._kv_lengths,
            query_lengths_host=self._query_lengths,
            kv_lengths_host=tuple(self._host_kv_lengths.tolist()),
        )
        positions = self._positions if self._offset_positions is None else self._offset_positions
        inputs = ModelInputs(self._ids(rows, newest), positions, metadata, None, self._states)
        return self.extension.of_rows(inputs, rows, 1, self._staging)

    def _advance(self, rows: list[Sequence]) -> None:
        self._host_positions += 1
        self._host_kv_lengths += 1
        self._steps_left -= 1
        change = self.tables.follow(rows)
        if change.arrays:
            self.tables.apply(change, self._staging.upload(*change.arrays))
        if self._shares_memory:
            self._advance_host_slots()
            if self._host_offset_positions is not None:
                self._host_offset_positions += 1
            return
        if self._offset_positions is not None:
            self._offset_positions.add_(1)
        self._advance_on_device(self._positions, self.tables.device, self._block_size, self._kv_lengths, self._slots)

    def _rebuild(self, rows: list[Sequence]) -> None:
        """Make the inputs of other rows, or of other positions."""
        count = len(rows)
        if rows is not self._rows:
            self._rows = rows
            self._query_lengths = (1,) * count
            self._states = tuple([s.state for s in rows])
            self._cu_seqlens = torch.arange(count + 1, dtype=torch.int32, device=self._device)
        self._is_stale = False
        self._steps_left = 0
        self._lengths = np.fromiter((s.prompt_length + s.max_new_tokens - 1 for s in rows), np.int64, count)
        self._host_positions = np.fromiter((s.cache_length for s in rows), np.int64, count)
        self._host_kv_lengths = (self._host_positions + 1).astype(np.int32)
        change = self.tables.follow(rows)
        offsets = np.fromiter((s.position_offset for s in rows), np.int64, count)
        self._host_offset_positions = self._host_positions + offsets if offsets.any() else None
        offset = () if self._host_offset_positions is None else (self._host_offset_positions,)
        # On a device they are those of the step before: it counts them up.
        uploaded_positions = self._host_positions if self._shares_memory else self._host_positions - 1
        positions, *uploaded = self._staging.upload(uploaded_positions, *offset, *change.arrays)
        self.tables.apply(change, uploaded[len(offset) :])
        self._positions = positions
        self._offset_positions = uploaded[0] if offset else None
        if self._shares_memory:
            self._host_slots = self._slots_on_host()
            self._slots = torch.from_numpy(self._host_slots)
            self._kv_lengths = torch.from_numpy(self._host_kv_lengths)
            return
        self._kv_lengths = torch.empty(count, dtype=torch.int32, device=self._device)
        self._slots = torch.empty_like(positions)
        self._advance_on_device(positions, self.tables.device, self._block_size, self._kv_lengths, self._slots)

    def _slots_on_host(self) -> Indices:
        """Return where the step's tokens are stored."""
        blocks = self.tables.host[np.arange(len(self._rows)), self._host_positions // self._block_size]
        return blocks.astype(np.int64) * self._block_size + self._host_positions % self._block_size

    def _advance_host_slots(self) -> None:
        """Move slots on by a token, in place."""
        self._host_slots += 1
        offsets = self._host_positions % self._block_size
        if not offsets.all():
            entered = np.flatnonzero(offsets == 0)
            blocks = self.tables.host[entered, self._host_positions[entered] // self._block_size]
            self._host_slots[entered] = blocks.astype(np.int64) * self._block_size

    def _ids(self, rows: list[Sequence], newest: NewestTokens | None) -> Tensor:
        if newest is not None and newest.rows is rows:
            return newest.ids
        unseen = [i for i, s in enumerate(rows) if s.has_unseen]
        known = np.fromiter((s.ids[-1] for s in rows), np.int64, len(rows))
        if not unseen:
            return self._staging.upload(known)[0]
        where = places_of([rows[i] for i in unseen], newest)
        assert newest is not None
        if len(unseen) == len(rows):
            return newest.ids.index_select(0, self._staging.upload(where)[0])
        ids, places, picked = self._staging.upload(known, np.array(unseen, np.int64), where)
        return ids.index_copy_(0, places, newest.ids.index_select(0, picked))
