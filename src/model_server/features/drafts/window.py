"""A step that checks drafts: one forward over each row's newest token and draft, and the choice of tokens."""

# Place j of a row computes the scores after the row's tokens and the first j tokens of its draft. The sampler chooses
# from them what it would choose in a step of its own: with the same history, the same random number, the same mask. The
# chosen token is the request's next one if the draft was right up to there, by induction from the first place, whose
# scores no draft touches. So a request gets the tokens that it gets without drafts.
#
# In the forward each place is a row with a single token and a table of its own, as in a decode step: sums have the same
# order. What is written to the cache behind the last accepted token is overwritten by the next step before it is read.

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.batch.sequence import Sequence
from model_server.batch.tables import BlockTables
from model_server.memory.transfer import Staging
from model_server.runner.runner import ModelInputs
from model_server.sampling.sampler import HostSampled, Sampler


@dataclass(frozen=True, slots=True)
class Window:
    """One step's drafts, perhaps empty; the host has seen all tokens."""

    rows: list[Sequence]
    drafts: list[list[int]]

    def inputs(self, tables: BlockTables, staging: Staging) -> ModelInputs:
        counts = np.array([1 + len(draft) for draft in self.drafts], np.int64)
        of_row = np.repeat(np.arange(len(self.rows)), counts)
        starts = np.array([s.cache_length for s in self.rows], np.int64)
        firsts = np.cumsum(counts) - counts
        positions = starts[of_row] + np.arange(len(of_row)) - firsts[of_row]
        offsets = np.array([s.position_offset for s in self.rows], np.int64)
        ids = np.array([i for s, draft in zip(self.rows, self.drafts, strict=True) for i in (s.ids[-1], *draft)])
        slots = [s.slots[a : a + n] for s, a, n in zip(self.rows, starts.tolist(), counts.tolist(), strict=True)]
        change = tables.follow(self.rows)
        rotated = positions + offsets[of_row]
        arrays = (ids, rotated, np.concatenate(slots), of_row, np.arange(len(of_row) + 1, dtype=np.int32))
        uploaded = staging.upload(*arrays, (positions + 1).astype(np.int32), *change.arrays)
        tables.apply(change, uploaded[6:])
        metadata = AttentionMetadata(
            slots=uploaded[2],
            block_tables=tables.device.index_select(0, uploaded[3]),
            cu_seqlens_q=uploaded[4],
            kv_lengths=uploaded[5],
            query_lengths_host=(1,) * len(of_row),
            kv_lengths_host=tuple((positions + 1).tolist()),
        )
        return ModelInputs(uploaded[0], uploaded[1], metadata, None)

    def check(self, logits: Tensor, sampler: Sampler) -> CheckedTokens:
        """Choose tokens from logits [num_places, vocab_size] float32, perhaps overwritten."""
        firsts = np.cumsum([0] + [1 + len(draft) for draft in self.drafts])[:-1].tolist()
        chosen = _Chosen(len(self.rows))
        consumed = [0] * len(self.rows)
        going = list(range(len(self.rows)))
        place = 0
        try:
            while going:
                places = torch.tensor([firsts[row] + place for row in going], device=logits.device)
                part = logits.index_select(0, places)
                sampled = sampler.sample(part, [self.rows[row].row for row in going])
                chosen.add(going, sampled.to_host())
                going = [row for row in going if self._goes_on(row, place, chosen, consumed)]
                place += 1
        finally:
            for sequence, count in zip(self.rows, consumed, strict=True):
                if count and sequence.row.grammar is not None:
                    sequence.row.grammar.rewind(count)
        ids = torch.tensor([row[-1] for row in chosen.ids], dtype=torch.int64, device=logits.device)
        return CheckedTokens(ids, chosen.to_host())

    def _goes_on(self, row: int, place: int, chosen: _Chosen, consumed: list[int]) -> bool:
        """Whether the draft was right here and continues."""
        draft = self.drafts[row]
        if place >= len(draft) or chosen.failed[row] or chosen.ids[row][place:] != [draft[place]]:
            return False
        grammar = self.rows[row].row.grammar
        if grammar is None:
            return True
        consumed[row] += 1
        return grammar.try_next(draft[place])


class CheckedTokens:
    """A window's tokens on the host; `ids`: the last ones."""

    def __init__(self, ids: Tensor, host: HostSampled) -> None:
        self.ids = ids
        self._host = host

    def is_over(self) -> bool:
        return True

    def to_host(self) -> HostSampled:
        return self._host


class _Chosen:
    """Rows' tokens, place by place."""

    def __init__(self, num_rows: int) -> None:
        self.ids: list[list[int]] = [[] for _ in range(num_rows)]
        self.failed = [False] * num_rows
        self._logprobs: list[list[float]] = [[] for _ in range(num_rows)]
        self._top: list[list[list[tuple[int, float]]]] = [[] for _ in range(num_rows)]

    def add(self, rows: Rows[int], host: HostSampled) -> None:
        """Add tokens; unusable later scores end a row before them."""
        for index, row in enumerate(rows):
            if host.failed[index]:
                if self.ids[row]:
                    continue
                self.failed[row] = True
            self.ids[row].append(host.ids[index])
            self._logprobs[row].append(host.logprobs[index])
            self._top[row].append(host.top[index])

    def to_host(self) -> HostSampled:
        return HostSampled(
            ids=[i for row in self.ids for i in row],
            logprobs=[value for row in self._logprobs for value in row],
            top=[top for row in self._top for top in row],
            failed=self.failed,
            counts=[len(row) for row in self.ids],
        )
