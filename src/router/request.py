"""A valid request in the router's types, neither HTTP nor protobuf."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from router.errors import ValidationError
from router.generation_trace import GenerationTrace
from wire.images.prepared import ImagePlace, PreparedImage

GrammarKind = Literal["none", "json", "regex", "lark"]
AnswerKind = Literal["text", "marked", "call"]
"""How an answer is read: as text, with marks of reasoning or calls in it, or as one call in TGI's form. Where there are
marks the router looks for stop texts, and the shards do not know them."""


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """How the next token is chosen; defaults are off."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0  # TGI's: relative to the share of the token in the history
    presence_penalty: float = 0.0  # OpenAI's: absolute, over generated tokens
    absolute_frequency_penalty: float = 0.0  # OpenAI's
    logit_bias: tuple[tuple[int, float], ...] = ()
    watermark: bool = False
    grammar: str = ""
    grammar_kind: GrammarKind = "none"


@dataclass(frozen=True, kw_only=True)
class ValueRange:
    """A number's range."""

    # Field of `SamplingParameters`.
    name: str
    # The rule, behind the name.
    says: str
    low: float = -math.inf
    high: float = math.inf
    # It must be above `low`.
    excludes_low: bool = False
    excludes_high: bool = False

    @property
    def field(self) -> str:
        """What clients call it."""
        return self.name.removeprefix("absolute_")

    def holds(self, value: float) -> bool:
        return not (self._is_below(value) or self._is_above(value))

    def fault(self, value: float) -> ValidationError:
        """Return a number's refusal."""
        kind = "integer" if isinstance(value, int) else "decimal"
        end, limit = ("below_min", self.low) if self._is_below(value) else ("above_max", self.high)
        return ValidationError(
            f"`{self.field}` {self.says}", param=self.field, code=f"{kind}_{end}_value", given=value, limit=limit
        )

    def _is_below(self, value: float) -> bool:
        return value < self.low or (self.excludes_low and value == self.low)

    def _is_above(self, value: float) -> bool:
        return value > self.high or (self.excludes_high and value == self.high)


SAMPLING_RANGES = (
    ValueRange(name="temperature", says="must be > 0", low=0, excludes_low=True),
    ValueRange(name="repetition_penalty", says="must be > 0", low=0, excludes_low=True),
    ValueRange(name="frequency_penalty", says="must be in [-2, 2]", low=-2, high=2),
    ValueRange(name="absolute_frequency_penalty", says="must be in [-2, 2]", low=-2, high=2),
    ValueRange(name="presence_penalty", says="must be in [-2, 2]", low=-2, high=2),
    # 1.0 is TGI's own value for "off" and what OpenAI's clients send; TGI refuses it.
    ValueRange(name="top_p", says="must be in (0, 1]", low=0, high=1, excludes_low=True),
    ValueRange(name="typical_p", says="must be in (0, 1)", low=0, high=1, excludes_low=True, excludes_high=True),
    ValueRange(name="min_p", says="must be in [0, 1]", low=0, high=1),
    ValueRange(name="top_k", says="must be > 0", low=0, excludes_low=True),
)
"""What a given value must be, in the order in which TGI checks, and in TGI's words."""

FILTERS_OFF = {"top_k": 0, "top_p": 1.0, "typical_p": 1.0, "min_p": 0.0}
"""What removes candidates before one is sampled: switched off where temperature 0 asks for the likeliest token."""


@dataclass(frozen=True, kw_only=True)
class StoppingParameters:
    """When it ends; `max_new_tokens` is exact."""

    max_new_tokens: int
    stop_sequences: tuple[str, ...] = ()
    ignore_eos_token: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in a prompt; no chunk ends within `is_indivisible` ones."""

    image: PreparedImage
    place: ImagePlace
    is_indivisible: bool = False


def salt_of(account: str, asked: str | None) -> str:
    """Return what a prompt's KV is apart by: a client cannot write the salt of an account, which has no line's end."""
    return account if asked is None else f"{account}\n{asked}"


@dataclass(frozen=True, kw_only=True)
class ValidRequest:
    """A request that may run as it is."""

    # As the model reads it; `num_characters`: of the client's own.
    inputs: str
    num_characters: int
    # After truncation; `input_length`: their number.
    input_ids: tuple[int, ...]
    input_length: int
    # Those of a chat in front of all answers to its last user message, where layers keep states; 0: unknown.
    answer_start: int = 0
    truncate: int  # the most prompt tokens that were kept: the user's value, else the server's limit; for the log
    decoder_input_details: bool = False
    top_n_tokens: int = 0
    # A LoRA adapter's name; `adapter`: its load id, if loaded while serving.
    adapter_id: str | None = None
    adapter: int | None = None
    # The probable answer, for drafts.
    prediction_ids: tuple[int, ...] = ()
    # In the order of `input_ids`.
    images: tuple[PlacedImage, ...] = field(default=(), repr=False)
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stopping: StoppingParameters
    # Lower is earlier.
    priority: int = 0
    # The API key whose turn it is, and its share; empty: of all without one.
    key: str = ""
    weight: float = 1.0
    # KV is shared only among requests with the same.
    cache_salt: str = ""
    answer: AnswerKind = "text"
    trace: GenerationTrace | None = field(default=None, compare=False, repr=False)  # only with a collector

    @property
    def namespace(self) -> str:
        """Return what requests with the same weights share."""
        return (self.adapter_id or "") if self.adapter is None else f"{self.adapter_id}@{self.adapter}"

    @property
    def cache_namespace(self) -> str:
        """Return what requests that may share KV have in common."""
        return f"{self.namespace}\n{self.cache_salt}" if self.cache_salt else self.namespace
