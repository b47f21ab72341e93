"""What the engine returns of one step; `model_server.rpc.convert` makes messages of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    """Why a request ended; the first in this order wins."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


# One Tokens and one Generation are made for every row of every step. They are not frozen: that would triple the time.


@dataclass(slots=True)
class Tokens:
    """Parallel lists; `is_special` is empty for prompts, as in TGI."""

    ids: list[int]
    logprobs: list[float]
    texts: list[str]
    is_special: list[bool]

    def append(self, later: Tokens) -> None:
        """The tokens of `later` after these."""
        self.ids += later.ids
        self.logprobs += later.logprobs
        self.texts += later.texts
        self.is_special += later.is_special


@dataclass(frozen=True, slots=True)
class PlacesTop:
    """The likeliest tokens at the last places of a prompt: `count` of each place in turn, the best first."""

    tokens: Tokens
    count: int


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """The end of a request; `seed` only if it sampled."""

    text: str
    generated_tokens: int
    finish_reason: FinishReason
    seed: int | None


@dataclass(slots=True)
class Generation:
    """What one step produced for one request, or its `error`."""

    request_id: int
    tokens: Tokens | None = None
    prefill_tokens: Tokens | None = None
    prefill_top: PlacesTop | None = None
    top_tokens: list[Tokens] = field(default_factory=list)
    generated_text: GeneratedText | None = None
    error: str | None = None
    grammar_at_fault: bool = False  # of the error, and not the server
    overloaded: bool = False  # of the error: it may be tried again

    def append(self, later: Generation) -> None:
        """Append what the step produced for it next."""
        assert self.tokens is not None and later.tokens is not None
        self.tokens.append(later.tokens)
        self.top_tokens += later.top_tokens
        self.generated_text = later.generated_text


@dataclass(frozen=True, slots=True)
class CachedBatch:
    """What the router learns of a batch that stays; `current_tokens`: of its next forward."""

    id: int
    request_ids: list[int]
    max_tokens: int
    current_tokens: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to a Prefill or Decode; durations in nanoseconds."""

    generations: list[Generation]
    # None when nothing continues.
    batch: CachedBatch | None
    forward_ns: int
    decode_ns: int
    total_ns: int
    concat_ns: int | None = None
    phases_ns: tuple[int, ...] = ()  # in the order of `wire.step_phases.PHASES`
    reports: tuple[object, ...] = ()  # of features
