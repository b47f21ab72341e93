"""A request's sampling and stopping, checked by the router."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["json", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text must match: a JSON schema, regex, or llguidance grammar."""

    kind: GrammarKind
    text: str


FILTERS: dict[str, float] = {"top_k": 0, "top_p": 1.0, "typical_p": 1.0, "min_p": 0.0}
"""What removes candidates before one is sampled, and the value that switches it off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParameters:
    """How the next token is chosen; defaults are plain argmax.

    `frequency_penalty` is TGI's (relative, prompt included), the others OpenAI's (generated tokens only).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    do_sample: bool = False
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    absolute_frequency_penalty: float = 0.0
    # Pairs of token id and bias.
    logit_bias: tuple[tuple[int, float], ...] = ()
    watermark: bool = False
    grammar: Grammar | None = None

    @property
    def samples(self) -> bool:
        """Whether to sample, by TGI's rule (`utils/tokens.py`) and min_p."""
        return self.do_sample or self.temperature != 1.0 or bool(self.filters)

    @property
    def filters(self) -> frozenset[str]:
        return frozenset(name for name, off in FILTERS.items() if getattr(self, name) != off)

    def largest_rank(self, vocab_size: int) -> int:
        """Return top-k's number of tokens; `vocab_size` where off."""
        return min(self.top_k, vocab_size) if self.top_k > 0 else vocab_size

    @property
    def dropped_mass(self) -> float:
        """Return what top-p may remove; -1 where off."""
        return 1.0 - self.top_p if self.top_p < 1.0 else -1.0

    @property
    def log_min_p(self) -> float:
        """Return min-p's lowest relative log probability; -inf where off."""
        return math.log(self.min_p) if self.min_p > 0.0 else -math.inf

    @property
    def penalises(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.absolute_frequency_penalty != 0.0
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoppingParameters:
    """When a request ends; `stop_token_ids` also where end tokens are ignored."""

    max_new_tokens: int
    stop_sequences: tuple[str, ...] = ()
    ignore_eos_token: bool = False
    stop_token_ids: frozenset[int] = frozenset()
