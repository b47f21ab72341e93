"""Requests' tokens on the device, for drafts and penalties."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from model_server.batch.newest import NewestTokens, places_of
from model_server.batch.sequence import Sequence
from model_server.memory.transfer import Staging

# A history gets wider by at least this many tokens.
_SPARE_TOKENS = 256

Indices = npt.NDArray[np.int64]


def history_bytes(max_length: int) -> int:
    return 4 * (max_length + max_length // 4 + _SPARE_TOKENS)


class Histories:
    """`ids` [num_rows, capacity] int32: each row's prompt and generated tokens.

    The device appends in windows; what the host knows is never uploaded again.
    """

    def __init__(self, device: torch.device) -> None:
        self.ids = torch.zeros(0, _SPARE_TOKENS, dtype=torch.int32, device=device)
        self._place: dict[Sequence, int] = {}
        self._stored: dict[Sequence, int] = {}

    def note_stored(self, places: dict[Sequence, int]) -> None:
        """Note rows' places, with known lengths, before another step."""
        self._place = dict(places)
        self._stored = {s: s.cache_length + 1 for s in places}

    def release(self, kept: list[Sequence]) -> None:
        """Hold these sequences alone."""
        self._place = {s: self._place[s] for s in kept if s in self._place}
        self._stored = {s: self._stored[s] for s in kept if s in self._stored}

    def update(self, rows: list[Sequence], newest: NewestTokens | None, room: int, staging: Staging) -> None:
        """Bring it to `rows`, with `room` behind the newest token.

        Args:
            newest: Tokens that the host has not seen.
        """
        lengths = [s.cache_length + 1 for s in rows]
        self._widen(max(lengths) + room)
        width = self.ids.shape[1]
        kept = np.fromiter((self._place.get(s, -1) for s in rows), np.int64, len(rows))
        flat: list[Indices] = []
        values: list[npt.NDArray[np.int32]] = []
        for row, (sequence, length) in enumerate(zip(rows, lengths, strict=True)):
            first = self._stored.get(sequence, 0)
            last = length - sequence.has_unseen
            if first < last:
                flat.append(np.arange(row * width + first, row * width + last))
                values.append(np.array(sequence.ids[first:last], np.int32))
        unseen = [row for row, s in enumerate(rows) if s.has_unseen]
        arrays: list[npt.NDArray[np.generic]] = [np.maximum(kept, 0)]
        if flat:
            arrays += [np.concatenate(flat), np.concatenate(values)]
        if unseen:
            ends = [row * width + lengths[row] - 1 for row in unseen]
            arrays += [np.array(ends, np.int64), places_of([rows[row] for row in unseen], newest)]
        gathered, *uploaded = staging.upload(*arrays)
        ids = self.ids.index_select(0, gathered) if len(self.ids) else self.ids.new_zeros(len(rows), width)
        if flat:
            ids.view(-1).index_copy_(0, uploaded[0], uploaded[1])
        if unseen:
            assert newest is not None
            at, source = uploaded[-2:]
            ids.view(-1).index_copy_(0, at, newest.ids.index_select(0, source).to(torch.int32))
        self.ids = ids
        self._place, self._stored = {}, {}

    def select(self, kept: Tensor, room: int, longest: int) -> None:
        """Keep rows at `kept` [n] int64."""
        self.ids = self.ids.index_select(0, kept)
        self.reserve(longest + room)

    def reserve(self, capacity: int) -> None:
        self._widen(capacity)

    def _widen(self, capacity: int) -> None:
        missing = capacity - self.ids.shape[1]
        if missing > 0:
            self.ids = pad(self.ids, (0, max(missing, _SPARE_TOKENS, self.ids.shape[1] // 4)))
