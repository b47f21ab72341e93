"""Parameters that several bodies share, typed and documented; bounds are enforced by `router.generation.validation`.

`x-limits` names operators' bounds, filled in by a running server.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field, WithJsonSchema

from router.limits import MAX_CHOICES
from router.schemas.base import FLOAT32_MAX, Body, Float32, Int32, Int64, Items, TextOrItems, UInt32, UInt64

_INT32_MAX = 2**31 - 1
_UINT32_MAX = 2**32 - 1
_STOP_TEXTS = {"type": "array", "items": {"type": "string"}, "x-limits": {"maxItems": "max_stop_sequences"}}
_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": 1024,
}

PositiveFloat = Annotated[
    Float32, WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "maximum": FLOAT32_MAX})
]  # fmt: skip
NonNegativeFloat = Annotated[Float32, WithJsonSchema({"type": "number", "minimum": 0, "maximum": FLOAT32_MAX})]
PenaltyValue = Annotated[Float32, WithJsonSchema({"type": "number", "minimum": -2, "maximum": 2})]
PositiveInt = Annotated[UInt32, WithJsonSchema({"type": "integer", "minimum": 1, "maximum": _UINT32_MAX})]
MostTokens = Annotated[
    Annotated[int, Field(ge=-1, le=_UINT32_MAX)],
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": _UINT32_MAX}, {"enum": [-1]}]}),
]
TopN = Annotated[
    UInt32, WithJsonSchema({"type": "integer", "minimum": 0, "x-limits": {"maximum": "max_top_n_tokens"}})
]  # fmt: skip
TopLogprobs = Annotated[
    UInt32, WithJsonSchema({"type": "integer", "minimum": 0, "maximum": 20})
]  # fmt: skip
Number = Annotated[
    UInt32,
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_CHOICES, "x-limits": {"maximum": "max_choices"}}),
]

RepetitionPenalty = Annotated[
    PositiveFloat | None,
    Field(description="Divides the logits of tokens that occur in prompt or answer; 1.0 is off.", examples=[1.03]),
]
FrequencyPenalty = Annotated[
    PenaltyValue | None,
    Field(
        description="Subtracted from a token's logit for each time that it has been generated; 0 is off.",
        examples=[0.2],
    ),
]
PresencePenalty = Annotated[
    PenaltyValue | None,
    Field(description="Subtracted from the logit of every token that has been generated; 0 is off.", examples=[0.2]),
]
TopK = Annotated[
    Annotated[Int32, WithJsonSchema({"type": "integer", "minimum": 1, "maximum": _INT32_MAX})] | None,
    Field(description="Sample only among this many of the most likely tokens. Absent: among all.", examples=[10]),
]
OpenAITopK = Annotated[
    Annotated[Int32, WithJsonSchema({"type": "integer", "minimum": -1, "maximum": _INT32_MAX})] | None,
    Field(
        description="Sample only among this many of the most likely tokens. 0, -1 or absent: among all.", examples=[10]
    ),
]
OpenAITopP = Annotated[
    Annotated[Float32, WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1})] | None,
    Field(
        description="Sample among the most likely tokens that together have this probability; 1 is off, 0 leaves the "
        "most likely one.",
        examples=[0.95],
    ),
]
TopP = Annotated[
    Annotated[Float32, WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "maximum": 1})] | None,
    Field(
        description="Sample among the most likely tokens that together have this probability; 1 is off.",
        examples=[0.95],
    ),
]
TypicalP = Annotated[
    Annotated[Float32, WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1})] | None,
    Field(
        description="Sample among the most typical tokens that together have this probability. Absent: off.",
        examples=[0.95],
    ),
]
MinP = Annotated[
    Annotated[Float32, WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1})] | None,
    Field(
        description="Minimum probability of a token relative to that of the most likely one; 0 is off.", examples=[0.05]
    ),
]
Temperature = Annotated[
    PositiveFloat | None,
    Field(
        description="Divides the logits: below 1 the answer gets more predictable, above 1 less. Setting it samples.",
        examples=[0.5],
    ),
]
OpenAITemperature = Annotated[
    NonNegativeFloat | None,
    Field(description="0 always takes the most likely token; any other value samples. Absent: 1.", examples=[0]),
]
Seed = Annotated[
    UInt64 | None,
    Field(
        description="The same seed gives the same tokens for the same request. Absent: a random seed.", examples=[42]
    ),
]
OpenAISeed = Annotated[
    Int64 | None,
    Field(
        description="The same seed gives the same tokens for the same request. -1 or absent: a random seed.",
        examples=[42],
    ),
]
MaxTokens = Annotated[
    PositiveInt | None,
    Field(
        description="Most tokens to generate. With the prompt they must fit `max_total_tokens` of `/info`, where not "
        "more than 1024 are counted; what fits is generated. Absent: as many as fit.",
        examples=[20],
    ),
]
OpenAIMaxTokens = Annotated[
    MostTokens | None,
    Field(
        description="Most tokens to generate. With the prompt they must fit `max_total_tokens` of `/info`, where not "
        "more than 1024 are counted; what fits is generated. -1 or absent: as many as fit.",
        examples=[20],
    ),
]
Stop = Annotated[
    Items[str],
    WithJsonSchema(_STOP_TEXTS),
    Field(
        description="Texts at which the answer ends, wherever they occur in it; the text is kept. "
        "Their total bytes are limited.",
        examples=[["\n\n"]],
    ),
]
_OPENAI_STOP_TEXTS = {"type": "array", "items": {"type": "string"}, "maxItems": 64}
OpenAIStop = Annotated[
    Annotated[TextOrItems[str], WithJsonSchema({"anyOf": [{"type": "string"}, _OPENAI_STOP_TEXTS]})] | None,
    Field(
        description="One or more texts at which the answer ends, 64 at most; the text itself is left out. "
        "Their total bytes are limited.",
        examples=[["\n\n"], "END"],
    ),
]
LogitBias = Annotated[
    Annotated[
        dict[str, Float32] | Items[Float32],
        WithJsonSchema({"anyOf": [_BIASES, {"type": "array", "items": {"enum": [0]}}]}),
    ]
    | None,
    Field(description="Added to the logits of tokens, by id; ids must be in the vocabulary.", examples=[{"17": -5}]),
]
MinTokens = Annotated[
    UInt32 | None,
    Field(
        description="Neither an end-of-sequence token nor a stop text ends the answer before it has this many tokens; "
        "a grammar whose text is complete still does. Must not exceed the maximum number of tokens. 0 is off.",
        examples=[5],
    ),
]
IgnoreEos = Annotated[bool, Field(description="Continue after an end-of-sequence token.", examples=[True])]
Choices = Annotated[
    Number | None, Field(description="Number of choices; each counts as a request. Absent: 1.", examples=[1])
]
Model = Annotated[
    str | None, Field(description="Any name: only one model is served. `tgi` means that one.", examples=["tgi"])
]
Stream = Annotated[bool, Field(description="Answer with server-sent events as tokens come.", examples=[False])]


Priority = Annotated[
    Annotated[int, Field(ge=-(2**63), lt=2**63)],
    Field(
        description="Whose turn it is while requests wait: lower ones are served earlier. Others than 0 need a server "
        "with `--scheduling-policy priority` or `--keys-file`; an API key bounds it.",
        examples=[0],
    ),
]

CacheSalt = Annotated[
    Annotated[str, Field(min_length=1, max_length=1024)] | None,
    Field(
        description="The prompt's KV cache is shared only with requests of the same salt; with an API key that has a "
        "cache of its own, of that key.",
        examples=["tenant-7"],
    ),
]


class AskedPriority(NamedTuple):
    """A priority, and the field that says it."""

    value: int = 0
    field: str = "priority"


ORDINARY = AskedPriority()


class CommonParameters(Body):
    """What every route that generates takes. A name that `SamplingParameters` has too means the same there."""

    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    typical_p: TypicalP = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    seed: Seed = None
    min_tokens: MinTokens = None
    ignore_eos: IgnoreEos = False
    priority: Priority = 0
    cache_salt: CacheSalt = None

    @property
    def asked_priority(self) -> AskedPriority:
        return AskedPriority(self.priority)
