"""Bodies of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema, model_validator

from router.api.chat.schema import Usage
from router.errors import FieldError
from router.schemas.base import Body, Items, UInt32
from router.schemas.guided import Constrained
from router.schemas.openai import OpenAIBody
from router.schemas.other_fields import Family
from router.schemas.parameters import MostTokens, Number, TopLogprobs

_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_PROMPT_SCHEMA = {
    "description": "A text, a list of texts, the token ids of one prompt, or a list of such lists.",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": _TOKEN_ID, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": _TOKEN_ID, "minItems": 1}, "minItems": 1},
    ],
}


def _prompts(value: Any) -> list[str | list[int]]:
    """Read prompts by hand: a union would try each form of a million ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(prompt, str) for prompt in value):
            return value
        if _are_ids(value):
            return [value]
        if all(isinstance(prompt, list) and prompt and _are_ids(prompt) for prompt in value):
            return value
    text = "expected a string, a non-empty array of strings, or non-empty arrays of token ids"
    raise FieldError(text, reason="invalid_type")


def _answer_start(value: Any) -> list[str | list[int]]:
    if not isinstance(value, str):
        raise FieldError("expected a string", reason="invalid_type")
    return [value]


def _empty_start() -> list[str | list[int]]:
    return [""]


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 2**32 for value in values)


class CompletionBody(OpenAIBody, Constrained):
    """An OpenAI completion request, with TGI's and common servers' additions. `user` and the like are ignored."""

    family: ClassVar[Family | None] = "completions"

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)] = Field(
        examples=["The capital of France is"]
    )
    max_tokens: MostTokens | None = Field(
        default=None,
        description="Most tokens to generate. With the prompt they must fit `max_total_tokens` of `/info`, where not "
        "more than 1024 are counted; what fits is generated. -1 or absent: as many as fit. With `echo` also 0: none.",
        examples=[20],
    )
    best_of: Number | None = Field(
        default=None,
        description="Generate this many choices per prompt and return the `n` most likely. Must not be less than `n`; "
        "more needs sampling, is limited by `max_best_of` of `/info`, and cannot be streamed. Absent: `n`.",
        examples=[1],
    )
    logprobs: TopLogprobs | None = Field(
        default=None,
        description="Report logprobs of the answer's tokens, and of this many of the most likely ones at each step.",
        examples=[2],
    )
    add_special_tokens: bool = Field(
        default=True,
        description="Add the special tokens of the tokenizer's template to a prompt that is a text.",
        examples=[True],
    )
    echo: bool = Field(
        default=False,
        description="Put the prompt before the text. With `logprobs` the server must have been started with "
        "`--enable-prefill-logprobs`, and the answer cannot be streamed.",
        examples=[True],
    )
    suffix: str | None = Field(
        default=None,
        description="Text after a gap that the answer fills, behind `prompt`; not with `echo`. Only where the model's "
        "tokenizer has marks for that, as those of many models of code.",
        examples=[None],
    )

    @property
    def only_echoes(self) -> bool:
        """Whether it asks for the prompt and its log probabilities alone."""
        return self.echo and self.max_tokens == 0


class InfillExtra(Body):
    """Another file, for context."""

    filename: str = Field(default="", description="Its name.", examples=["math.py"])
    text: str = Field(description="What is in it.", examples=["def add(a, b):"])


class InfillBody(CompletionBody):
    """llama.cpp's request for the text between two others."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_answer_start), WithJsonSchema({"type": "string"})] = Field(
        default_factory=_empty_start, description="Begin of the answer.", examples=["    return"]
    )
    input_prefix: str = Field(default="", description="Text before the gap.", examples=["def add(a, b):\n"])
    input_suffix: str = Field(default="", description="Text after the gap.", examples=["\n\nprint(add(1, 2))"])
    input_extra: Items[InfillExtra] = Field(
        default_factory=list, description="Other files, for context.", examples=[[]]
    )

    samplers: Items[str] = Field(
        default_factory=list,
        description="What editors send. The order of the filters is fixed here, and `infill` is none of them.",
        examples=[["top_k", "top_p", "infill"]],
    )
    t_max_predict_ms: UInt32 | None = Field(
        default=None,
        description="What editors send. It ends no answer here: `n_predict` does.",
        examples=[1000],
    )

    @model_validator(mode="after")
    def _has_one_answer(self) -> InfillBody:
        for name, value, neutral in (
            ("n", self.n, (None, 1)), ("best_of", self.best_of, (None, 1)), ("echo", self.echo, (False,)),
            ("suffix", self.suffix, (None,)), ("logprobs", self.logprobs, (None,)),
        ):  # fmt: skip
            if value not in neutral:
                raise FieldError(f"`{name}` is not served here: use /v1/completions", param=name, reason="unsupported")
        return self


class InfillAnswer(BaseModel):
    """An answer in llama.cpp's form; without a stream `stop` is true."""

    content: str
    stop: bool
    stop_type: Literal["eos", "limit", "word"]
    truncated: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int


class InfillEvent(BaseModel):
    """One server-sent event; the last one is a whole InfillAnswer, without more text."""

    content: str
    stop: bool


class CompletionLogprobs(BaseModel):
    """Parallel lists, one entry per token; `text_offset` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


CompletionFinishReason = Literal["stop", "length"]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionFinishReason


class Completion(BaseModel):
    object: Literal["text_completion"] = "text_completion"
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: str | None = None


class CompletionChunkChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionFinishReason | None


class CompletionChunk(BaseModel):
    """One server-sent event of a completion stream; the stream ends with `data: [DONE]`."""

    object: Literal["text_completion"] = "text_completion"
    id: str
    created: int
    choices: list[CompletionChunkChoice]
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    service_tier: str | None = None
