"""How many drafted tokens pay: rows lengthen a step, right ones shorten the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

# What drafts must at least gain before a step is made longer for them: what steps cost is known to some hundredths, and
# what a step does beside its forward, by tokens, gains nothing.
LEAST_GAIN = 1.1
# Weight of the newest outcome in a request's share of accepted tokens, and that share before anything is known.
_NEW_WEIGHT = 0.1
FIRST_SHARE = 0.5


class Acceptance:
    """The share of right drafted tokens, newest weighing most."""

    __slots__ = ("share",)

    def __init__(self, share: float = FIRST_SHARE) -> None:
        self.share = share

    def note(self, *, accepted: int, refused: bool) -> None:
        """Note accepted tokens, and whether the next was refused."""
        for right in (1.0,) * accepted + (0.0,) * refused:
            self.share += _NEW_WEIGHT * (right - self.share)


class Pace:
    """A step's seconds by token rows, interpolated."""

    def __init__(self, costs: Sequence[tuple[int, float]]) -> None:
        """Take (token rows, seconds), rising, equal on all ranks."""
        self._rows = np.array([rows for rows, _ in costs], np.float64)
        self._seconds = np.maximum.accumulate(np.array([seconds for _, seconds in costs], np.float64))

    def cost(self, rows: int) -> float:
        """Return a step's seconds, extrapolated at the end's slope."""
        if rows <= self._rows[-1] or len(self._rows) == 1:
            return float(np.interp(rows, self._rows, self._seconds))
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._rows[-1] - self._rows[-2])
        return float(self._seconds[-1] + slope * (rows - self._rows[-1]))

    def gain(self, length: int, lengths: Sequence[float], shares: Sequence[float], drafting: float = 0.0) -> float:
        """Return the speedup over plain steps with length + 1 places a row.

        Args:
            lengths: Rows' mean drafts.
            shares: Rows' acceptance.
            drafting: Seconds of a step's drafts.
        """
        num_rows = len(lengths)
        brought = float(num_rows)
        # By products and sums alone: numpy's powers have other last bits on other CPUs, and ranks must decide alike.
        for drafted, share in zip(lengths, shares, strict=True):
            chance = 1.0
            for place in range(min(length, math.ceil(drafted))):
                chance *= share
                brought += chance * min(1.0, drafted - place)
        return brought * self.cost(num_rows) / (num_rows * (self.cost(num_rows * (length + 1)) + drafting))

    def best_length(
        self,
        lengths: Sequence[int],
        sure: Sequence[int],
        shares: Sequence[float],
        most: int,
        drafting: Callable[[int], float] | None = None,
    ) -> int:
        """Return the best draft length; 0: a plain step.

        Args:
            lengths: Rows' drafts.
            sure: First tokens that are surely right; `shares`: of the others.
            drafting: Seconds by length; None: free.
        """
        num_rows = len(lengths)
        plain = self.cost(num_rows) / num_rows
        best, best_gain = 0, LEAST_GAIN
        checked, brought = num_rows, float(num_rows)
        chances = [1.0] * num_rows
        for length in range(1, most + 1):
            longer = [row for row, drafted in enumerate(lengths) if drafted >= length]
            if not longer:
                break
            checked += len(longer)
            for row in longer:
                if length > sure[row]:
                    chances[row] *= shares[row]
                brought += chances[row]
            seconds = self.cost(checked) + (0.0 if drafting is None else drafting(length))
            gain = brought * plain / seconds
            if gain > best_gain:
                best, best_gain = length, gain
        return best
