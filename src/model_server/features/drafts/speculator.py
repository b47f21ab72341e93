"""Drafts for a batch's next step, as many as are worth checking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from model_server.batch.sequence import Sequence
from model_server.distributed.group import ProcessGroup
from model_server.engine.steps.watcher import ComputedRow, ComputedStep
from model_server.features.drafts.costs import step_costs
from model_server.features.drafts.lookup import NO_GUESS, Guess, History, Prediction
from model_server.features.drafts.pace import FIRST_SHARE, Acceptance, Pace
from model_server.features.drafts.report import Drafted
from model_server.features.drafts.window import CheckedTokens, Window
from model_server.memory.kv_cache import KvCache
from model_server.runner.runner import Kept, Runner
from wire.step_phases import DraftKind

# Returns a drafter's tokens for these rows; [num_rows, length] int64: those that are drafted instead, or -1.
Compute = Callable[[list[Sequence], npt.NDArray[np.int64]], list[list[int]]]
# Of a step for which nothing paid, for each of the steps behind it that are not searched for.
_ROWS_OF_REST = 10


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft; `num_forced` first tokens have no alternative by grammar."""

    ids: list[int]
    num_forced: int = 0
    # What guessed the rest.
    others: DraftKind = DraftKind.LOOKUP

    def kind(self, place: int) -> DraftKind:
        return DraftKind.GRAMMAR if place < self.num_forced else self.others


NO_DRAFT = Draft([])


@dataclass(slots=True)
class Drafting:
    """What is kept of one request."""

    acceptance: Acceptance
    prediction: Prediction | None = None
    history: History = field(default_factory=History)
    length: int = 0
    draft: Draft = NO_DRAFT
    # An unchecked draft, compared with the next tokens.
    untried: list[int] = field(default_factory=list)


class Speculator:
    """Drafts by lookup and grammars, alike on all ranks, on the device thread."""

    # It must see steps without drafts (`on_step`).
    watches = False

    def __init__(self, most: int) -> None:
        """Take the longest draft; there are none before `pace` is set."""
        self.most = most
        self.pace: Pace | None = None
        self.drafting: dict[int, Drafting] = {}  # by request id, those of the last step
        self.first_share = FIRST_SHARE  # of a request's tokens that is taken to be right, where no other request runs
        self._rest = 0  # so many steps are not searched for

    def window(self, rows: list[Sequence], compute: Compute | None = None) -> Window | None:
        """Return what the next step checks, if it pays; the host has seen all tokens.

        Args:
            compute: Asks the batch's drafter, if there is one.
        """
        if self.pace is None:
            return None
        if self._rest:
            self._rest -= 1
            return None
        known = self._follow(rows)
        drafts = self._drafts(rows, known, self.pace, compute)
        if drafts is None:
            self._rest = self._rest_after(len(rows))
            return None
        for one, drafting in zip(drafts, known, strict=True):
            drafting.draft = one
        return Window(rows, [one.ids for one in drafts])

    def measure(self, runner: Runner, cache: KvCache, world: ProcessGroup, max_length: int) -> None:
        """Set `pace`; overwrites the cache."""
        self.pace = Pace(step_costs(runner, cache, world, max_length))

    def bytes_beside(self, max_length: int) -> int:
        """Return device memory beside the model's."""
        return 0

    def retains(self) -> Kept | None:
        """Return what the next step must keep, if anything."""
        return None

    def retains_plain(self, rows: list[Sequence]) -> Kept | None:
        """Return what a step of single tokens must keep."""
        return self.retains()

    def on_step(self, rows: list[ComputedRow], step: ComputedStep) -> None:
        """A step without drafts was submitted."""

    def note(self, window: Window, checked: CheckedTokens, step: ComputedStep) -> Drafted:
        """Note what became of a window."""
        counts = checked.to_host().counts or []
        tokens, rights = [0] * len(DraftKind), [0] * len(DraftKind)
        longest, predicted = 0, {}
        for sequence, draft, count in zip(window.rows, window.drafts, counts, strict=True):
            right = min(count - 1, len(draft))
            drafting = self.drafting.get(sequence.id)
            if drafting is not None and right >= drafting.draft.num_forced:
                # That what a grammar forces is right says nothing of other guesses.
                guessed = right - drafting.draft.num_forced
                drafting.acceptance.note(accepted=guessed, refused=right < len(draft))
            if sequence.owned:
                longest = max(longest, len(draft))
                kinds = [_kind(drafting, place) for place in range(len(draft))]
                for place, kind in enumerate(kinds):
                    tokens[kind] += 1
                    rights[kind] += place < right
                if DraftKind.PREDICTION in kinds:
                    accepted, rejected = (part.count(DraftKind.PREDICTION) for part in (kinds[:right], kinds[right:]))
                    predicted[sequence.id] = accepted, rejected
        return Drafted(longest, tuple(tokens), tuple(rights), predicted)

    def _rest_after(self, num_rows: int) -> int:
        """Return steps without a search after nothing paid; few rows always search."""
        return num_rows // _ROWS_OF_REST

    def _most_for(self, num_rows: int) -> int:
        """Return the longest draft for so many rows."""
        return self.most

    def _drafts(
        self, rows: list[Sequence], known: list[Drafting], pace: Pace, compute: Compute | None
    ) -> list[Draft] | None:
        """Return drafts that pay, if any."""
        drafts = [self._draft(sequence, drafting) for sequence, drafting in zip(rows, known, strict=True)]
        lengths = [len(one.ids) for one in drafts]
        if not any(lengths):
            return None
        shares = [one.acceptance.share for one in known]
        longest = pace.best_length(lengths, [one.num_forced for one in drafts], shares, self._most_for(len(rows)))
        if not longest:
            for one, drafting in zip(drafts, known, strict=True):
                drafting.untried = [] if one.num_forced else one.ids
            return None
        return [replace(one, ids=one.ids[:longest]) for one in drafts]

    def _follow(self, rows: list[Sequence]) -> list[Drafting]:
        known = [self.drafting.get(s.id) for s in rows]
        shares = [one.acceptance.share for one in known if one is not None]
        mean = sum(shares) / len(shares) if shares else self.first_share
        found = []
        for sequence, one in zip(rows, known, strict=True):
            if one is None or len(sequence.ids) < one.length:
                foretold = Prediction(sequence.prediction) if sequence.prediction else None
                one = Drafting(Acceptance(mean), foretold)
            if one.untried and len(sequence.ids) > one.length:
                right = sequence.ids[one.length] == one.untried[0]
                one.acceptance.note(accepted=int(right), refused=not right)
            one.untried = []
            one.history.follow(sequence.ids)
            one.length = len(sequence.ids)
            found.append(one)
        self.drafting = {s.id: one for s, one in zip(rows, found, strict=True)}
        return found

    def longest(self, sequence: Sequence) -> int:
        """Return the most tokens that it may have and has slots for."""
        if sequence.row.parameters.watermark:
            return 0  # its tokens depend on the one before, which the sampler reads from the device
        left = sequence.max_new_tokens - sequence.num_sampled - 1
        return max(0, min(self.most, left, len(sequence.slots) - sequence.cache_length - 1))

    def _draft(self, sequence: Sequence, drafting: Drafting) -> Draft:
        most = self.longest(sequence)
        if not most:
            return NO_DRAFT
        grammar = sequence.row.grammar
        forced = [] if grammar is None else grammar.forced()[:most]
        ids, kind = self._guess(sequence, drafting, most - len(forced), forced)
        if grammar is not None:
            ids = grammar.possible([*forced, *ids])
        elif not ids and kind is not DraftKind.MODEL:
            return NO_DRAFT
        return Draft(ids, num_forced=len(forced), others=kind)

    def _guess(
        self, sequence: Sequence, drafting: Drafting, most: int, forced: list[int]
    ) -> tuple[list[int], DraftKind]:
        """Return what the prediction, or a longer match in its own tokens, has next."""
        foretold, own = foretold_after(sequence, drafting, most, forced), drafting.history.guess(most, forced)
        if foretold.ids and foretold.matched >= own.matched:
            return foretold.ids, DraftKind.PREDICTION
        return own.ids, DraftKind.LOOKUP


def _kind(drafting: Drafting | None, place: int) -> DraftKind:
    return DraftKind.LOOKUP if drafting is None else drafting.draft.kind(place)


def foretold_after(sequence: Sequence, drafting: Drafting, most: int, forced: list[int]) -> Guess:
    """Return what the prediction, if any, has behind its tokens and `forced`."""
    if drafting.prediction is None:
        return NO_GUESS
    num_generated = len(sequence.ids) - sequence.prompt_length + len(forced)
    return drafting.prediction.guess(most, drafting.history.end(forced), num_generated)
