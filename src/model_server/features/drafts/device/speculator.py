"""Drafts found and checked on the device, and the length of a batch's windows."""

# Rows with a grammar, watermark, prediction, or penalised image tokens need the host: their batches draft as on a CPU.

from __future__ import annotations

from dataclasses import dataclass

import torch

from model_server.batch.sequence import Sequence
from model_server.batch.tables import BlockTables
from model_server.features.drafts.device.history import history_bytes
from model_server.features.drafts.device.state import WindowState
from model_server.features.drafts.device.tokens import RowOutcome, WindowTokens
from model_server.features.drafts.drafters.drafts import LookedUp, RowDrafts
from model_server.features.drafts.drafters.lookup import LookUp, look_up_on
from model_server.features.drafts.pace import LEAST_GAIN, Acceptance, Pace
from model_server.features.drafts.report import Drafted
from model_server.features.drafts.speculator import Compute, Speculator
from model_server.features.drafts.window import Window
from model_server.memory.transfer import Staging
from model_server.runner.graph_sizes import window_lengths
from model_server.sampling import places
from model_server.sampling.places import PENALTY_BYTES
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
    """What the host has seen of a request's drafts: acceptance, and mean length."""

    acceptance: Acceptance
    drafted: float | None = None


class BatchWindows:
    """The windows of one batch."""

    def __init__(self, state: WindowState, speculator: DeviceSpeculator) -> None:
        self.state = state
        self._speculator = speculator
        # Bound of the newest window's drafts.
        self.length = 0
        # Tokens beyond one that windows may have brought unseen.
        self.unseen = 0
        self.steps = STEPS  # since the length was decided
        # Steps without windows.
        self.rest = 0
        self.undrafted = 0  # steps without drafts since the last one with some
        self.looks = 0  # since a request joined: how often drafts were tried again after they had not paid
        self._known: dict[Sequence, KnownDrafts] = {}

    def known(self, rows: list[Sequence]) -> list[KnownDrafts]:
        """Return what is known of rows; new ones begin at the mean."""
        shares = [one.acceptance.share for one in self._known.values()]
        mean = sum(shares) / len(shares) if shares else self._speculator.first_share
        for sequence in rows:
            if sequence not in self._known:
                self.looks = 0
                self._known[sequence] = KnownDrafts(Acceptance(mean))
        return [self._known[sequence] for sequence in rows]

    def release(self, kept: list[Sequence]) -> None:
        """Forget sequences that leave."""
        self.state.release(kept)
        wanted = set(kept)
        for sequence in [one for one in self._known if one not in wanted]:  # in an order that all ranks have
            self._speculator.note_ended(self._known.pop(sequence).acceptance)

    def submitted(self, rows: list[Sequence], length: int) -> None:
        """Note a submitted window."""
        self.length = length
        self.unseen += length
        self.steps += 1
        self.undrafted = 0 if length else self.undrafted + 1
        for sequence in rows:
            sequence.row.num_generated += 1

    def rested(self) -> None:
        """A plain step is submitted."""
        self.rest = max(0, self.rest - 1)
        self.undrafted += 1

    def has_new(self, rows: list[Sequence]) -> bool:
        """Whether some rows joined since a length was decided."""
        return any(sequence not in self._known for sequence in rows)

    def seen(self, rows: list[Sequence], tokens: WindowTokens, length: int) -> Drafted:
        """Note a seen window, and return this rank's drafts."""
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
        kind = self._speculator.kind
        found[0][kind], found[1][kind] = num_tokens, num_right
        return Drafted(longest, tuple(found[0]), tuple(found[1]))


class DeviceSpeculator(Speculator):
    """A `Speculator` whose windows a device makes, which on a GPU may run ahead of the host."""

    # Of the device's drafts.
    kind = DraftKind.LOOKUP

    def __init__(self, most: int, max_rows: int, device: torch.device, block_size: int, *, alone: bool) -> None:
        """Take the bounds of drafts.

        Args:
            most: The longest draft.
            max_rows: Token rows of a step with drafts.
            alone: No other ranks must decide alike.
        """
        super().__init__(most)
        self.alone = alone
        self._max_rows = max_rows
        self._device = device
        self._block_size = block_size
        self._choices = window_lengths(most)
        self._look_up: LookUp = look_up_on(device)
        self._judged: Pace | None = None
        # By number of rows, and whether the host drafts, at the pace that was judged.
        self._pays: dict[tuple[int, bool], bool] = {}

    def bytes_beside(self, max_length: int) -> int:
        """Return histories, twice while rows change, and penalties' part at each place."""
        most_rows = self._max_rows // 2
        return 2 * most_rows * history_bytes(max_length) + self._max_rows * max_length * PENALTY_BYTES

    def start(self, staging: Staging, tables: BlockTables) -> BatchWindows:
        """Return the windows of a batch with these tables."""
        drafts = self._row_drafts(staging)
        return BatchWindows(WindowState(self._device, self._block_size, staging, tables, self.most, drafts), self)

    def on_device(self, windows: BatchWindows | None, rows: list[Sequence]) -> bool:
        """Whether the device makes the next window of these decoding rows."""
        if windows is not None and windows.rest:
            return False
        return self._may_pay(len(rows)) and all(map(_fits, rows))

    def on_host(self, rows: list[Sequence]) -> bool:
        """Whether the host may make it, having seen all tokens."""
        return not all(map(_fits, rows)) and self._may_pay(len(rows), by_host=True)

    def window(self, rows: list[Sequence], compute: Compute | None = None) -> Window | None:
        """Return the host's window."""
        return super().window(rows, compute) if self.on_host(rows) else None

    def note_ended(self, acceptance: Acceptance) -> None:
        """Note what became of a request's drafts."""

    def length(self, windows: BatchWindows, rows: list[Sequence]) -> int:
        """Return the next window's longest draft; 0: as a plain step."""
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
        """Whether the length is decided again."""
        return windows.steps >= STEPS

    def _row_drafts(self, staging: Staging) -> RowDrafts:
        return LookedUp(self._look_up, self.most)

    def _lengths(self, rows: list[Sequence], known: list[KnownDrafts]) -> list[float]:
        """Return rows' mean draft lengths."""
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
        return [one for one in self._choices if num_rows * (one + 1) <= self._max_rows]

    def _may_pay(self, num_rows: int, *, by_host: bool = False) -> bool:
        """Whether perfect drafts would gain; `by_host`: no drafter computes them."""
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
    """Whether histories are right, not leaving out image tokens."""
    return not sequence.row.parameters.penalises or sequence.row.num_prompt == sequence.prompt_length


def _note(known: KnownDrafts, outcome: RowOutcome) -> None:
    before = outcome.drafted if known.drafted is None else known.drafted
    known.drafted = before + _NEW_WEIGHT * (outcome.drafted - before)
    if outcome.checked:
        right = max(0, outcome.got - 1)
        known.acceptance.note(accepted=right, refused=right < outcome.checked)
    elif outcome.first_right is not None:
        known.acceptance.note(accepted=int(outcome.first_right), refused=not outcome.first_right)
