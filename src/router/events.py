"""A request's events: `Prefilled`? (with prompt details), `TokenGenerated`*, then one of `Finished` and `Failed`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

FinishReason = Literal["length", "eos_token", "stop_sequence"]


@dataclass(slots=True)  # not frozen: that costs more than the rest of making one
class Token:
    """One token; JSON has null for a non-finite `logprob`."""

    id: int
    text: str
    logprob: np.float32
    special: bool = False


@dataclass(frozen=True, slots=True)
class PlacesTop:
    """The likeliest tokens at the last places of a prompt, as parallel lists."""

    # There are so many that they become tokens only where an answer lists them.
    count: int = 0  # at each place
    ids: Sequence[int] = ()
    texts: Sequence[str] = ()
    logprobs: Sequence[np.float32] = ()

    def at(self, place: int) -> tuple[Token, ...]:
        """Return the tokens at a place, the best first; -1 is the place of the prompt's last token."""
        place += len(self.ids) // max(self.count, 1)
        if place < 0:
            return ()
        here = slice(place * self.count, (place + 1) * self.count)
        return tuple(map(Token, self.ids[here], self.texts[here], self.logprobs[here]))


NO_PLACES = PlacesTop()


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt's tokens with their logprobs, and the likeliest tokens at its last places."""

    tokens: tuple[Token, ...]
    top_tokens: PlacesTop = NO_PLACES


@dataclass(slots=True)  # not frozen: that costs more than the rest of making one
class TokenGenerated:
    """A token that is not the last."""

    token: Token
    top_tokens: tuple[Token, ...] = ()
    # With a step's first token, their number; 0 with others.
    step_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Predicted:
    """A prediction's checked tokens: in the answer, or not."""

    accepted: int = 0
    rejected: int = 0

    def __add__(self, other: Predicted) -> Predicted:
        return Predicted(self.accepted + other.accepted, self.rejected + other.rejected)


@dataclass(frozen=True, slots=True)
class Finished:
    """The last token, with the text; times by `time.monotonic()`."""

    token: Token
    top_tokens: tuple[Token, ...]
    text: str
    generated_tokens: int
    finish_reason: FinishReason
    seed: int | None
    queued_at: float
    started_at: float
    cached_tokens: int = 0  # of the prompt, from the prefix cache
    predicted: Predicted | None = None  # None: the request had no prediction
    step_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without an answer, and why."""

    error: Exception


Event = Prefilled | TokenGenerated | Finished | Failed
