"""What decides a step with drafts, as tensors, so that the next is launched before the host knows the tokens."""

# A window is a row's newest token and draft, cut to its slots and tokens left. The host knows bounds. Places behind a
# draft, and idle rows, are padding in the reserved block.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.batch.newest import NewestTokens
from model_server.batch.sequence import Sequence
from model_server.batch.tables import BlockTables
from model_server.features.drafts.device.history import Histories
from model_server.features.drafts.drafters.drafts import Brought, RowDrafts
from model_server.features.drafts.drafters.queries import RowsAt, single_queries
from model_server.memory.transfer import Staging
from model_server.runner.runner import Kept, ModelInputs
from model_server.sampling.places import Places

# What became of the first token of a draft.
NO_DRAFT, WRONG, RIGHT = range(3)


@dataclass(slots=True)
class _Rows:
    """Rows' state, [num_rows] int64 each."""

    newest: Tensor
    # Place of the newest token in the cache, not written yet.
    start: Tensor
    # Generated tokens; `left`: those still allowed.
    made: Tensor
    left: Tensor
    # End of its slots.
    limit: Tensor
    # Of a position to the place in the cache.
    offset: Tensor
    # The newest draft's tokens.
    valid: Tensor
    draft: Tensor  # [num_rows, 1 or more]

    def select(self, kept: Tensor) -> _Rows:
        return _Rows(*(getattr(self, name).index_select(0, kept) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Checked:
    """What a window brought, on the device."""

    # [num_rows] int64: last tokens.
    newest: Tensor
    # [num_rows, 3 * num_places + 4] float64: ids, logprobs, failures by place; tokens got, drafts checked, draft's
    # length, and its first token's outcome.
    packed: Tensor


class WindowState:
    """The rows of a batch while windows continue, on the device thread."""

    def __init__(
        self, device: torch.device, block_size: int, staging: Staging, tables: BlockTables, most: int, drafts: RowDrafts
    ) -> None:
        """most: the longest draft."""
        self.rows: list[Sequence] = []
        self.is_stale = True
        self._device = device
        self._block_size = block_size
        self._staging = staging
        self._tables = tables
        self._most = most
        self._drafts = drafts
        self._histories = Histories(device)
        self._tensors: _Rows | None = None
        self._place: dict[Sequence, int] = {}
        self._checked = torch.zeros(0)  # how many drafted tokens of each row the step checks, -1: the row is idle

    def note_other_step(self) -> None:
        """Note a step made elsewhere, with known lengths."""
        if self.is_stale:
            return
        self.is_stale = True
        self._histories.note_stored(self._place)
        self._drafts.stop(self._place)
        for sequence, row in self._place.items():
            if sequence.row.history is not None:
                sequence.row.history = self._histories.ids[row].long()
        self.rows = []
        self._place = {}

    def release(self, kept: list[Sequence]) -> None:
        """Forget sequences that leave."""
        wanted = set(kept)
        self._histories.release(kept)
        self._place = {s: place for s, place in self._place.items() if s in wanted}
        if len(self._place) < len(self.rows):
            self.rows = []

    def can_go_on(self, rows: list[Sequence]) -> bool:
        """Whether a window of `rows` needs nothing of the last step's result."""
        return not self.is_stale and all(s in self._place for s in rows)

    def start(self, rows: list[Sequence], newest: NewestTokens | None, unseen: int) -> None:
        """Begin the next window of `rows`, which may have got `unseen` tokens beyond those counted."""
        tables = self._tables
        change = tables.follow(rows)
        ends = np.fromiter((s.prompt_length + s.max_new_tokens - 1 for s in rows), np.int64, len(rows))
        self._limits = np.minimum(tables.num_slots, ends)
        starts = np.fromiter((s.cache_length for s in rows), np.int64, len(rows))
        self._longest = np.minimum(starts + unseen, self._limits)
        room = 2 * (self._most + 1)
        if rows is self.rows and not self.is_stale:
            assert self._tensors is not None
            if change.arrays:
                limits, *uploaded = self._staging.upload(self._limits, *change.arrays)
                tables.apply(change, uploaded)
                self._tensors.limit = limits
            self._histories.reserve(int(self._longest.max()) + room)
            return
        if self.can_go_on(rows):
            assert self._tensors is not None
            kept = np.fromiter((self._place[s] for s in rows), np.int64, len(rows))
            places, limits, *uploaded = self._staging.upload(kept, self._limits, *change.arrays)
            tables.apply(change, uploaded)
            self._tensors = self._tensors.select(places)
            self._tensors.limit = limits
            self._drafts.select(places)
            self._histories.select(places, room, int(self._longest.max()))
        else:
            assert not unseen, "rows join that the host does not know the lengths of"
            self.note_other_step()  # those that join come from another batch
            self._histories.update(rows, newest, room, self._staging)
            made = np.fromiter((s.num_sampled for s in rows), np.int64, len(rows))
            most = np.fromiter((s.max_new_tokens for s in rows), np.int64, len(rows))
            offsets = np.fromiter((s.position_offset for s in rows), np.int64, len(rows))
            arrays = (starts, made, most - made, self._limits, offsets)
            start, made_, left, limit, offset, *uploaded = self._staging.upload(*arrays, *change.arrays)
            tables.apply(change, uploaded)
            newest_ids = self._histories.ids.gather(1, start[:, None]).squeeze(1).long()
            none = torch.zeros_like(start)
            self._tensors = _Rows(newest_ids, start, made_, left, limit, offset, none, none[:, None])
            self._drafts.set_rows(rows)
            self.is_stale = False
        self.rows = rows
        self._place = {s: i for i, s in enumerate(rows)}

    def guess(self, rows: list[Sequence], forced: npt.NDArray[np.int64]) -> list[list[int]]:
        """Draft for a step that the host lays out, which has seen all tokens; `forced` as in `RowDrafts.draft`."""
        self.start(rows, None, 0)
        (uploaded,) = self._staging.upload(forced)
        ids, _ = self._drafts.draft(self._before(), forced.shape[1], uploaded)
        self.note_other_step()
        found: list[list[int]] = ids.tolist()
        return found

    def inputs(self, length: int) -> ModelInputs:
        """Return inputs with length + 1 places for each row."""
        rows, num_places = self._tensors, length + 1
        assert rows is not None
        before = self._before()
        rows.draft, rows.valid = self._drafts.draft(before, length)
        left = torch.minimum(rows.left - 1, rows.limit - rows.start - 1)
        # A row without a token or a slot left has -1 here, or less.
        self._checked = torch.minimum(rows.valid.clamp(max=length), left).clamp(min=-1)
        number = torch.arange(num_places, device=self._device)
        inside = number <= self._checked[:, None]
        ids = torch.cat((rows.newest[:, None], rows.draft[:, :length]), 1)
        at = rows.start[:, None] + number
        self._stored, self._attention = single_queries(before, at, inside, 0, joined=True)
        positions = (self._stored + rows.offset[:, None]).masked_fill(~inside, 0)
        return ModelInputs(ids.masked_fill(~inside, 0).view(-1), positions.view(-1), self._attention, None)

    def _before(self) -> RowsAt:
        rows = self._tensors
        assert rows is not None
        return RowsAt(
            rows.newest, rows.start, rows.limit, self._histories.ids, self._tables.device, self._block_size,
            self._longest, self._limits, is_known=self._staging.shares_memory,
        )  # fmt: skip

    def places(self, length: int) -> Places:
        """Return what comes before each place of the last inputs."""
        rows, ids = self._tensors, self._histories.ids
        assert rows is not None
        number = torch.arange(length + 1, device=self._device)
        known = (rows.start + 1)[:, None]
        if length:
            # Overwritten by the tokens that are drawn.
            ids.scatter_(1, known + number[:-1], rows.draft[:, :length].to(torch.int32))
        longest = int(self._longest.max()) + 1 + length
        return Places(rows.made[:, None] + number, ids, known + number, longest)

    def accept(self, length: int, ids: Tensor, packed: Tensor, kept: Kept | None) -> Checked:
        """Accept what was drawn as far as drafts were right.

        Args:
            ids: [num_rows * num_places] int64.
            packed: [3, num_rows * num_places] float64: ids, logprobs, failures.
            kept: Of the forward.
        """
        rows, checked = self._tensors, self._checked
        assert rows is not None
        num_rows, num_places = len(self.rows), length + 1
        drawn, failed = ids.view(num_rows, num_places), packed[2].view(num_rows, num_places) != 0
        number = torch.arange(num_places, device=self._device)
        right = (drawn[:, :length] == rows.draft[:, :length]) & (number[:length] < checked[:, None])
        accepted = (right & ~failed[:, :length]).long().cumprod(1).sum(1)
        # Scores that are not numbers end the window before them; the next step says so.
        unusable = failed.gather(1, accepted[:, None]).squeeze(1) & (accepted > 0)
        got = (accepted + 1 - unusable.long()).masked_fill(checked < 0, 0)
        is_right = (drawn[:, 0] == rows.draft[:, 0]) & ~failed[:, 0]
        first = torch.where((rows.valid > 0) & (got > 0), is_right.long() + WRONG, NO_DRAFT)
        newest = torch.where(got > 0, drawn.gather(1, (got - 1).clamp(min=0)[:, None]).squeeze(1), rows.newest)
        history = self._histories.ids
        at = (rows.start + 1)[:, None] + number
        history.scatter_(1, at, torch.where(number < got[:, None], drawn.to(torch.int32), history.gather(1, at)))
        start = rows.start + got
        self._drafts.apply(Brought(drawn, got, kept, self._stored, self._attention))
        made, left = rows.made + got, rows.left - got
        self._tensors = _Rows(newest, start, made, left, rows.limit, rows.offset, rows.valid, rows.draft)
        by_place = packed.view(3, num_rows, num_places).transpose(0, 1).reshape(num_rows, -1)
        numbers = torch.stack((got, checked.clamp(min=0), rows.valid, first), 1)
        return Checked(newest, torch.cat((by_place, numbers.double()), 1))
