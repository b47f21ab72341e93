"""Bodies of the native routes `/`, `/generate`, `/generate_stream`, and of the tokenizing ones."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from router.schemas.base import Body, Float32, Int32, UInt32, UInt64
from router.schemas.grammar import Grammar


class GenerateParameters(Body):
    """Sampling, stopping and reporting options; what is absent has the default of the generation config of TGI."""

    best_of: UInt64 | None = None
    temperature: Float32 | None = None
    repetition_penalty: Float32 | None = None
    frequency_penalty: Float32 | None = None
    top_k: Int32 | None = None
    top_p: Float32 | None = None
    typical_p: Float32 | None = None
    min_p: Float32 | None = Field(default=None, description="Least probability relative to the likeliest token's.")
    do_sample: bool = False
    max_new_tokens: UInt32 | None = None
    ignore_eos: bool = Field(default=False, description="Generate on after an end-of-sequence token.")
    return_full_text: bool | None = None
    stop: list[str] = Field(default_factory=list)
    truncate: UInt64 | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: UInt64 | None = None
    top_n_tokens: UInt32 | None = None
    grammar: Grammar | None = None
    adapter_id: str | None = None


# TGI's trap, kept on purpose: without a `parameters` object a request samples, with an empty one it is greedy.
NO_PARAMETERS = GenerateParameters(do_sample=True)


class GenerateBody(Body):
    inputs: str
    parameters: GenerateParameters = NO_PARAMETERS


class CompatBody(GenerateBody):
    """The body of `POST /`."""

    stream: bool = False


class TokenizeBody(Body):
    """Takes a generate body; the parameters have no influence on the answer."""

    inputs: str
    parameters: GenerateParameters | None = None


class TokenModel(BaseModel):
    id: int
    text: str
    logprob: float | None
    special: bool


class PrefillTokenModel(BaseModel):
    id: int
    text: str
    logprob: float | None


FinishReasonName = Literal["length", "eos_token", "stop_sequence"]


class BestOfSequence(BaseModel):
    generated_text: str
    finish_reason: FinishReasonName
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillTokenModel]
    tokens: list[TokenModel]
    top_tokens: list[list[TokenModel]] | None = None


class Details(BaseModel):
    finish_reason: FinishReasonName
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
    finish_reason: FinishReasonName
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamEvent(BaseModel):
    """One server-sent event of a native stream; the last one carries `generated_text`."""

    index: int
    token: TokenModel
    top_tokens: list[TokenModel] | None = None
    generated_text: str | None
    details: StreamDetails | None


class TokenSpan(BaseModel):
    """A token of `/tokenize`; `start` and `stop` are byte offsets into the UTF-8 text."""

    id: int
    text: str
    start: int
    stop: int


class ChatTokenizeResponse(BaseModel):
    tokenize_response: list[TokenSpan]
    templated_text: str
