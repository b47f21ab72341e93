"""Bodies of TGI's own routes `/`, `/generate`, `/generate_stream`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, Field, WithJsonSchema

from router.schemas.base import Body, UInt64
from router.schemas.grammar import Grammar
from router.schemas.parameters import CommonParameters, MaxTokens, PenaltyValue, Stop, Stream, TopN

_AS_PROMPT = {"maximum": "max_input_tokens"}

Inputs = Annotated[
    str,
    WithJsonSchema({"type": "string", "minLength": 1}),
    Field(
        description="The prompt; not more than `max_input_tokens` of `/info`.", examples=["The capital of France is"]
    ),
]


class GenerateParameters(CommonParameters):
    """Sampling, stopping and reporting options; absent options have the defaults of TGI's generation config."""

    best_of: Annotated[
        Annotated[UInt64, WithJsonSchema({"type": "integer", "minimum": 0, "x-limits": {"maximum": "max_best_of"}})]
        | None,
        Field(
            description="Generate this many answers, each of which counts as a request, and return the most likely. "
            "More than 1 needs sampling and no `seed`; a stream allows only 1.",
            examples=[1],
        ),
    ] = None
    frequency_penalty: Annotated[
        PenaltyValue | None,
        Field(description="TGI's formula, relative to the frequency in prompt and answer; 0 is none.", examples=[0.1]),
    ] = None
    do_sample: bool = Field(
        default=False,
        description="Sample the tokens; otherwise the most likely one is taken, unless another parameter implies "
        "sampling. True by default in a request without `parameters`.",
        examples=[True],
    )
    max_new_tokens: MaxTokens = None
    return_full_text: bool | None = Field(
        default=None,
        description="Put the prompt before the generated text. Default: true for `POST /`, false elsewhere.",
        examples=[False],
    )
    stop: Stop = Field(default_factory=list)
    truncate: Annotated[
        Annotated[UInt64, WithJsonSchema({"type": "integer", "minimum": 1, "x-limits": _AS_PROMPT})] | None,
        Field(description="Keep only this many of the prompt's last tokens.", examples=[100]),
    ] = None
    watermark: bool = Field(
        default=False,
        description="Watermark the text: prefer tokens by which it can be recognized as generated.",
        examples=[True],
    )
    details: bool = Field(default=False, description="Report the tokens and why the answer ended.", examples=[True])
    decoder_input_details: bool = Field(
        default=False,
        description="Report the prompt's tokens too, with logprobs if the server was started with "
        "`--enable-prefill-logprobs`; not with a stream.",
        examples=[True],
    )
    top_n_tokens: Annotated[
        TopN | None, Field(description="Report this many of the most likely tokens at each step.", examples=[2])
    ] = None
    grammar: Grammar | None = Field(
        default=None,
        description="Constrains the answer to a regular expression or to JSON of a schema.",
        examples=[
            {"type": "regex", "value": "[0-9]{3}"},
            {"type": "json", "value": {"type": "object", "properties": {"age": {"type": "integer"}}}},
        ],
    )
    adapter_id: Annotated[
        str | None,
        Field(description="Name of a LoRA adapter of the server; null: the base model.", examples=[None]),
    ] = None


# TGI's trap, kept on purpose: without a `parameters` object a request samples, with an empty one it is greedy.
NO_PARAMETERS = GenerateParameters(do_sample=True)


class GenerateBody(Body):
    """A prompt and what to do with it."""

    names_of_parameters = GenerateParameters.known_names

    inputs: Inputs
    parameters: GenerateParameters = Field(
        default=NO_PARAMETERS,
        description="Absent: sampling with every default; an empty object is greedy.",
        examples=[{"max_new_tokens": 20}],
    )


class CompatBody(GenerateBody):
    """The body of `POST /`."""

    stream: Stream = False


class TokenModel(BaseModel):
    id: int
    text: str
    logprob: float | None
    special: bool


class PrefillTokenModel(BaseModel):
    id: int
    text: str
    logprob: float | None


class FinishReason(StrEnum):
    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


class BestOfSequence(BaseModel):
    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillTokenModel]
    tokens: list[TokenModel]
    top_tokens: list[list[TokenModel]] | None = None


class Details(BaseModel):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillTokenModel]
    tokens: list[TokenModel]
    best_of_sequences: list[BestOfSequence] | None = None
    top_tokens: list[list[TokenModel]] | None = None


class GenerateResponse(BaseModel):
    generated_text: str
    details: Details | None = None


class StreamDetails(BaseModel):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamEvent(BaseModel):
    """One server-sent event of `/generate_stream` or `/`; the last one carries `generated_text`."""

    index: int
    token: TokenModel
    top_tokens: list[TokenModel] | None = None
    generated_text: str | None
    details: StreamDetails | None
