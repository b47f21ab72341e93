"""Bodies of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, PlainValidator, WithJsonSchema

from router.schemas.base import Body, Float32, Int32, UInt32, UInt64
from router.schemas.chat import StreamOptions, Usage

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
    """By hand: a union would try, and report, every form for each of what may be a million ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(prompt, str) for prompt in value):
            return value
        if _are_ids(value):
            return [value]
        if all(isinstance(prompt, list) and prompt and _are_ids(prompt) for prompt in value):
            return value
    raise ValueError("expected a string, a non-empty array of strings, or non-empty arrays of token ids")


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 2**32 for value in values)


class CompletionBody(Body):
    """An OpenAI completion request, with TGI's and common servers' additions. `user` and the like are ignored."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    model: str | None = None
    max_tokens: UInt32 | None = None
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    top_k: Int32 | None = None
    typical_p: Float32 | None = None
    min_p: Float32 | None = None
    frequency_penalty: Float32 | None = None
    presence_penalty: Float32 | None = None
    repetition_penalty: Float32 | None = None
    logit_bias: dict[str, Float32] | list[Float32] | None = None
    seed: UInt64 | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    n: UInt32 | None = None
    best_of: UInt32 | None = None
    logprobs: UInt32 | None = None
    echo: bool = False
    suffix: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


class CompletionLogprobs(BaseModel):
    """Parallel lists, one entry per token; `text_offset` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
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
