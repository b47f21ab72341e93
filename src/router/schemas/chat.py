"""Bodies of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from router.schemas.base import Body, Float32, Int32, UInt32, UInt64
from router.schemas.grammar import Grammar


class TextPart(Body):
    type: Literal["text"]
    text: str


class ImageUrl(Body):
    url: str


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class CalledFunction(Body):
    """`arguments` is JSON text (OpenAI) or an object; TGI's clients call it `parameters`."""

    name: str
    description: str | None = None
    arguments: Any = None
    parameters: Any = None


class ToolCall(Body):
    id: str | None = None
    type: str = "function"
    function: CalledFunction


class Message(Body):
    """One turn. `content` may be absent, in an assistant's turn that calls tools and elsewhere."""

    role: str = Field(min_length=1, max_length=64)
    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = Field(default=None, description="For templates that show earlier reasoning.")
    reasoning: str | None = None


class FunctionDefinition(Body):
    """`parameters` is a JSON schema; TGI's clients call it `arguments`. `strict` changes nothing: calls always fit."""

    name: str
    description: str | None = None
    parameters: Any = None
    arguments: Any = None
    strict: bool = False

    @property
    def schema_of_parameters(self) -> Any:
        """None: the function takes none."""
        return self.arguments if self.parameters is None else self.parameters


class Tool(Body):
    type: str = "function"
    function: FunctionDefinition


class StreamOptions(Body):
    include_usage: bool = False


class ChatBody(Body):
    """An OpenAI chat request, with TGI's and common servers' additions. `user`, `store` and the like are ignored."""

    messages: list[Message] = Field(max_length=10_000)
    model: str | None = None
    max_tokens: UInt32 | None = None
    max_completion_tokens: UInt32 | None = Field(default=None, description="Wins over `max_tokens`.")
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
    logprobs: bool = False
    top_logprobs: UInt32 | None = None
    n: UInt32 | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = Field(
        default=None, description="`auto`, `none`, `required`, a function's name, or OpenAI's object with one."
    )
    parallel_tool_calls: bool = Field(default=True, description="An answer has one call at most, whatever this says.")
    tool_prompt: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="More variables for the chat template, for example `enable_thinking`."
    )
    reasoning_effort: str | None = Field(default=None, description="A variable of some chat templates.")
    response_format: Grammar | None = None

    @model_validator(mode="after")
    def _has_messages(self) -> ChatBody:
        if not self.messages:
            raise ValueError("`messages` must hold at least one message")
        return self


class TopLogprob(BaseModel):
    token: str
    logprob: float | None


class TokenLogprob(BaseModel):
    token: str
    logprob: float | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprob]


class AnsweredFunction(BaseModel):
    """`arguments` is the JSON text of an object. `description` is TGI's and always null."""

    description: None = None
    name: str
    arguments: str


class AnsweredCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: AnsweredFunction


class AssistantMessage(BaseModel):
    """Text, or the call of a tool."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[AnsweredCall] | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(BaseModel):
    object: Literal["chat.completion"] = "chat.completion"
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(BaseModel):
    name: str | None = None
    arguments: str


class CallDelta(BaseModel):
    """`id`, `type` and the function's `name` come once; the pieces of `arguments` are to be joined."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatChunk(BaseModel):
    """One server-sent event of a chat stream; the stream ends with `data: [DONE]`."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None
