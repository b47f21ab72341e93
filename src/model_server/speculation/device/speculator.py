"""Drafts that are found and checked on the device, and how long the windows of a batch are.

A grammar, a watermark, a foretold answer, and penalties of a prompt whose image tokens have no logits need the host:
batches that hold such a row draft as on a CPU (`speculation.speculator`), one step after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model_server.batch.results import Drafted
from model_server.batch.sequence import Sequence
from model_server.memory.transfer import Staging
from model_server.runner.graph_sizes import window_lengths
from model_server.sampling.windows import places
from model_server.sampling.windows.places import PENALTY_BYTES
from model_server.speculation.device.drafts import LookedUp, RowDrafts
from model_server.speculation.device.history import history_bytes
from model_server.speculation.device.lookup import LookUp, look_up_on
from model_server.speculation.device.state import WindowState
from model_server.speculation.device.tokens import RowOutcome, WindowTokens
from model_server.speculation.pace import LEAST_GAIN, Acceptance, Pace
from model_server.speculation.speculator import Speculator
from model_server.speculation.window import Window
from wire.step_phases import DraftKind

# A decision holds for so many steps, and gives way only to what gains so much more.
STEPS = 8
_CHANGE = 1.05
# Where no drafts pay, so many steps are plain ones before windows of one token look again whether drafts would.
_REST = 24
# Weight of the newest draft in the average length.
_NEW_WEIGHT = 0.25


@dataclass(slots=True)
class KnownDrafts:
    """What the host has seen of a request's drafts: how many are right, and how long the newest are on average."""

    acceptance: Acceptance
    drafted: float | None = None


class BatchWindows:
    """The windows of one batch. state: on the device. length: of the drafts that the newest window checked at most.
    unseen: how many tokens more than one the windows may have brought that the host has not seen. rest: so many steps
    are no windows."""

    def __init__(self, state: WindowState, kind: DraftKind = DraftKind.LOOKUP) -> None:
        """kind: of its drafts."""
        self.state = state
        self.kind = kind
        self.length = 0
        self.unseen = 0
        self.steps = STEPS  # since the length was decided
        self.rest = 0
        self.undrafted = 0  # windows without drafts since the last one with some
        self.looks = 0  # since a request joined: how often drafts were tried again after they had not paid
        self._known: dict[Sequence, KnownDrafts] = {}

    def known(self, rows: list[Sequence]) -> list[KnownDrafts]:
        """Of these rows; new ones begin at the mean of the others."""
        shares = [one.acceptance.share for one in self._known.values()]
        mean = sum(shares) / len(shares) if shares else None
        for sequence in rows:
            if sequence not in self._known:
                self.looks = 0
                self._known[sequence] = KnownDrafts(Acceptance() if mean is None else Acceptance(mean))
        return [self._known[sequence] for sequence in rows]

    def release(self, kept: list[Sequence]) -> None:
        """Some rows leave the batch: hold no sequence but `kept`."""
        self.state.release(kept)
        wanted = set(kept)
        self._known = {s: one for s, one in self._known.items() if s in wanted}

    def submitted(self, rows: list[Sequence], length: int) -> None:
        """A window of `rows` is on the device: `length` drafted tokens at most."""
        self.length = length
        self.unseen += length
        self.steps += 1
        self.undrafted = 0 if length else self.undrafted + 1
        for sequence in rows:
            sequence.row.num_generated += 1

    def rested(self) -> None:
        """A plain step is submitted."""
        self.rest = max(0, self.rest - 1)

    def seen(self, rows: list[Sequence], tokens: WindowTokens, length: int) -> Drafted:
        """The host has seen a window; what it drafted for this rank's requests."""
        self.unseen -= length
        num_tokens, num_right, longest = 0, 0, 0
        for sequence, outcome in zip(rows, tokens.outcomes, strict=True):
            sequence.row.num_generated += outcome.got - 1
            right = max(0, outcome.got - 1)
            known = self._known.get(sequence)
            if known is not None:
                _note(known, outcome)
            if sequence.owned:
                longest = max(longest, outcome.checked)
                num_tokens += outcome.checked
                num_right += right
        found = [0] * len(DraftKind), [0] * len(DraftKind)
        found[0][self.kind], found[1][self.kind] = num_tokens, num_right
        return Drafted(longest, tuple(found[0]), tuple(found[1]))


class DeviceSpeculator(Speculator):
    """As `Speculator`, for an asynchronous device."""

    def __init__(self, most: int, max_rows: int, device: torch.device, block_size: int, *, alone: bool) -> None:
        """most: the longest draft; max_rows: token rows of a step with drafts at most; alone: there are no other
        ranks, which must take the same decisions."""
        super().__init__(most)
        self.alone = alone
        self._max_rows = max_rows
        self._device = device
        self._block_size = block_size
        self._look_up: LookUp = look_up_on(device)
        self._judged: Pace | None = None
        # By number of rows, and whether the host drafts, at the pace that was judged.
        self._pays: dict[tuple[int, bool], bool] = {}

    def bytes_beside(self, max_length: int) -> int:
        """Of the histories, twice while rows change, and of what penalties make of them at each place."""
        most_rows = self._max_rows // 2
        return 2 * most_rows * history_bytes(max_length) + self._max_rows * max_length * PENALTY_BYTES

    def begin(self, staging: Staging) -> BatchWindows:
        """For a batch that has had no window."""
        return BatchWindows(self._state(staging, LookedUp(self._look_up, self.most)))

    def on_device(self, windows: BatchWindows | None, rows: list[Sequence]) -> bool:
        """Whether the next step of these rows, which all decode, is a window that the device makes."""
        if windows is not None and windows.rest:
            return False
        return self._may_pay(len(rows)) and all(map(_fits, rows))

    def on_host(self, rows: list[Sequence]) -> bool:
        """Whether it may be one that the host makes (`window`), which must have seen all tokens of the rows."""
        return not all(map(_fits, rows)) and self._may_pay(len(rows), by_host=True)

    def window(self, rows: list[Sequence]) -> Window | None:
        """As in `Speculator`, where the host makes it."""
        return super().window(rows) if self.on_host(rows) else None

    def length(self, windows: BatchWindows, rows: list[Sequence]) -> int:
        """The longest drafts that the next window of these rows checks; 0: it brings one token, as a plain step."""
        allowed = self._allowed(len(rows))
        present = max((one for one in allowed if one <= windows.length), default=0)
        if not self.is_due(windows) and (not self.alone or rows is windows.state.rows):
            return present
        windows.steps, is_new = 0, windows.state.is_stale
        known = windows.known(rows)
        lengths, shares = self._lengths(rows, known), [one.acceptance.share for one in known]
        gains = {one: self._gain(one, lengths, shares) for one in allowed}
        best = max(gains, key=lambda one: (gains[one], -one), default=0)
        if not best or gains[best] < LEAST_GAIN:
            return self._when_none_pays(windows, rows, is_new=is_new, present=present)
        return best if not present or gains[best] > _CHANGE * gains[present] else present

    def is_due(self, windows: BatchWindows) -> bool:
        """Whether the next window's length is decided again."""
        return windows.steps >= STEPS

    def _state(self, staging: Staging, drafts: RowDrafts) -> WindowState:
        return WindowState(self._device, self._block_size, staging, self.most, drafts)

    def _lengths(self, rows: list[Sequence], known: list[KnownDrafts]) -> list[float]:
        """How long the rows' drafts are on average."""
        return [one.drafted or 0.0 for one in known]

    def _gain(self, length: int, lengths: list[float], shares: list[float]) -> float:
        assert self.pace is not None
        return self.pace.gain(length, lengths, shares)

    def _when_none_pays(self, windows: BatchWindows, rows: list[Sequence], *, is_new: bool, present: int) -> int:
        """The length of the next window."""
        windows.rest = 0 if present or is_new else _REST
        return 0

    def _most_for(self, num_rows: int) -> int:
        return min(self.most, self._max_rows // num_rows - 1)

    def _allowed(self, num_rows: int) -> list[int]:
        return [one for one in window_lengths(self.most) if num_rows * (one + 1) <= self._max_rows]

    def _may_pay(self, num_rows: int, *, by_host: bool = False) -> bool:
        """Whether drafts gain anything if all of them are right. by_host: no drafter computes them."""
        pace = self.pace
        if pace is None:
            return False
        if pace is not self._judged:
            self._judged, self._pays = pace, {}
        key = num_rows, by_host
        if key not in self._pays:
            gain = pace.gain if by_host else self._gain
            gains = [gain(one, [one] * num_rows, [1.0] * num_rows) for one in self._allowed(num_rows)]
            self._pays[key] = max(gains, default=0.0) >= LEAST_GAIN
        return self._pays[key]


def _fits(sequence: Sequence) -> bool:
    return places.fits(sequence.row) and not sequence.prediction and _is_penalised_by_its_ids(sequence)


def _is_penalised_by_its_ids(sequence: Sequence) -> bool:
    """Not where penalties leave out image tokens, for which there are no logits: the histories here have them."""
    return not sequence.row.parameters.penalises or sequence.row.num_prompt == sequence.prompt_length


def _note(known: KnownDrafts, outcome: RowOutcome) -> None:
    before = outcome.drafted if known.drafted is None else known.drafted
    known.drafted = before + _NEW_WEIGHT * (outcome.drafted - before)
    if outcome.checked:
        right = max(0, outcome.got - 1)
        known.acceptance.note(accepted=right, refused=right < outcome.checked)
    elif outcome.first_right is not None:
        known.acceptance.note(accepted=int(outcome.first_right), refused=not outcome.first_right)
