"""Drafts by a computing drafter, and which pay, decided before."""

from __future__ import annotations

import math
from dataclasses import replace

from model_server.batch.results import Drafted
from model_server.batch.sequence import Sequence
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache
from model_server.runner.runner import Kept, Runner
from model_server.speculation.drafters.drafter import ComputedRow, ComputedStep, DraftedRunner, Drafter, DraftRow
from model_server.speculation.lookup import NO_GUESS
from model_server.speculation.pace import Pace
from model_server.speculation.speculator import Draft, Drafting, Speculator
from model_server.speculation.window import CheckedTokens, Window
from wire.step_phases import DraftKind

# Where no drafts pay a step checks one token of each row now and then, to learn whether they would: one step of at
# least so many, and at most this share of the time, beside that for the tokens which a draft model lacks.
_LEAST_PAUSE = 32
_MOST_TIME = 0.005
# Weight of the request that ended last in what is expected of the drafter for one that runs alone.
_ENDED_WEIGHT = 0.5


class ModelSpeculator(Speculator):
    """Drafts by grammars, then predictions, then the drafter."""

    def __init__(self, most: int, drafter: Drafter) -> None:
        """most: the longest draft."""
        super().__init__(most)
        self.drafter = drafter
        self.watches = drafter.retains() is not None
        self._plain_steps = 0

    def measure(self, runner: Runner, cache: KvCache, world: ProcessGroup, max_length: int) -> None:
        super().measure(runner, cache, world, max_length)
        assert isinstance(runner, DraftedRunner)
        self.drafter.measure(runner.drafters_part(cache), world)

    def retains(self) -> Kept | None:
        return self.drafter.retains()

    def on_step(self, rows: list[ComputedRow], step: ComputedStep) -> None:
        if step.kept is not None:
            self.drafter.on_step(rows, step.kept)

    def note(self, window: Window, checked: CheckedTokens, step: ComputedStep) -> Drafted:
        """Note a window; draft models keep right tokens' keys."""
        drafted = super().note(window, checked, step)
        counts = checked.to_host().counts or []
        if step.kept is not None:
            self.drafter.on_step(accepted_rows(window, counts), step.kept)
        for sequence, count in zip(window.rows, counts, strict=True):
            drafting = self.drafting.get(sequence.id)
            if drafting is not None and drafting.written:
                drafting.keys = min(drafting.written, sequence.cache_length + count)
                drafting.written = 0
        return drafted

    def _drafts(self, rows: list[Sequence], known: list[Drafting], pace: Pace) -> list[Draft] | None:
        if self.drafter.pace is None:
            return None
        mosts = [self.longest(sequence) for sequence in rows]
        drafts = [self._without_model(*one) for one in zip(rows, known, mosts, strict=True)]
        lengths = [
            len(one.ids) if one.others is not DraftKind.MODEL else most for one, most in zip(drafts, mosts, strict=True)
        ]
        by_model = [
            range(len(one.ids), most) for one, most in zip(drafts, mosts, strict=True) if one.others is DraftKind.MODEL
        ]
        shares = [one.acceptance.share for one in known]
        longest = self._best_length(lengths, [one.num_forced for one in drafts], by_model, shares, pace)
        if not longest:
            return None
        asked: list[tuple[int, DraftRow]] = []
        for row, (one, sequence, length) in enumerate(zip(drafts, rows, lengths, strict=True)):
            most = min(longest, length) - len(one.ids)
            if one.others is DraftKind.MODEL and most > 0:
                asked.append((row, DraftRow(sequence, known[row].keys, one.ids, most)))
        found = self.drafter.draft([one for _, one in asked]) if asked else []
        for (row, wanted), ids in zip(asked, found, strict=True):
            known[row].written = len(wanted.ids) + len(ids) - 1
            drafts[row] = replace(drafts[row], ids=[*wanted.forced, *ids])
        return [self._possible(sequence, one, longest) for sequence, one in zip(rows, drafts, strict=True)]

    def _follow(self, rows: list[Sequence]) -> list[Drafting]:
        """Follow rows; new ones begin with the acceptance of ended ones, which differs little."""
        present = {sequence.id for sequence in rows}
        for request_id, one in self.drafting.items():
            if request_id not in present:
                self.first_share += _ENDED_WEIGHT * (one.acceptance.share - self.first_share)
        return super()._follow(rows)

    def _rest_after(self, num_rows: int) -> int:
        return 0  # `_best_length` pauses

    def _without_model(self, sequence: Sequence, drafting: Drafting, most: int) -> Draft:
        """Return what is forced or foretold; `others` is MODEL otherwise."""
        grammar = sequence.row.grammar
        forced = [] if grammar is None or not most else grammar.forced()[:most]
        foretold = NO_GUESS
        if drafting.prediction is not None:
            num_generated = len(sequence.ids) - sequence.prompt_length + len(forced)
            end = drafting.history.end(forced)
            foretold = drafting.prediction.guess(most - len(forced), end, num_generated)
        by_drafter = not foretold.ids and self.drafter.can_draft(sequence)
        kind = DraftKind.MODEL if by_drafter else DraftKind.PREDICTION
        return Draft([*forced, *foretold.ids], num_forced=len(forced), others=kind)

    def _possible(self, sequence: Sequence, draft: Draft, longest: int) -> Draft:
        ids = draft.ids[:longest]
        grammar = sequence.row.grammar
        return replace(draft, ids=ids if grammar is None else grammar.possible(ids))

    def _best_length(
        self, lengths: list[int], sure: list[int], by_model: list[range], shares: list[float], pace: Pace
    ) -> int:
        """Return this step's draft length; now and then 1 where none pay."""
        longest = pace.best_length(lengths, sure, shares, self.most, lambda length: self._seconds(by_model, length))
        self._plain_steps = 0 if longest else self._plain_steps + 1
        if longest or not any(lengths):
            return longest
        rows = sum(length > 0 for length in lengths)
        seconds = pace.cost(len(lengths) + rows) + self._seconds(by_model, 1)
        pause = max(_LEAST_PAUSE, math.ceil((seconds / pace.cost(len(lengths)) - 1) / _MOST_TIME))
        if self._plain_steps < pause:
            return 0
        self._plain_steps = 0
        return 1

    def _seconds(self, by_model: list[range], length: int) -> float:
        """Return the time of drafting."""
        assert self.drafter.pace is not None
        rows = (sum(place in places for places in by_model) for place in range(length))
        return sum(self.drafter.pace.cost(count) for count in rows if count)


def accepted_rows(window: Window, counts: list[int]) -> list[ComputedRow]:
    """Return what a window computed for good."""
    found, first = [], 0
    for sequence, draft, count in zip(window.rows, window.drafts, counts, strict=True):
        found.append(ComputedRow(sequence, sequence.cache_length, first, count, first + count - 1))
        first += 1 + len(draft)
    return found
