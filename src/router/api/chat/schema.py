"""Bodies of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from router.errors import FieldError
from router.schemas.base import Body, Items, TextOrItems, check_keys
from router.schemas.guided import Constrained
from router.schemas.openai import TemplateBody, TextPart
from router.schemas.parameters import MostTokens, OpenAIMaxTokens, TopLogprobs


class ImageUrl(Body, place="chat content"):
    """The address of an image."""

    url: str = Field(description="An address or a data URL.", examples=["data:image/png;base64,iVBORw0KGgo="])
    detail: Literal["auto", "high", "low"] | None = Field(
        default=None,
        description="`low`: at most 512 pixels a side; else as the model's processor does.",
        examples=["low"],
    )


class ImagePart(Body, place="chat content"):
    """An image, for models that read images."""

    type: Literal["image_url"] = Field(description="The kind of part.", examples=["image_url"])
    image_url: ImageUrl = Field(description="The image.", examples=[{"url": "data:image/png;base64,iVBORw0KGgo="}])


class RefusalPart(Body, place="chat content"):
    """What an earlier turn of the assistant has refused with; the model reads it as text."""

    type: Literal["refusal"] = Field(description="The kind of part.", examples=["refusal"])
    refusal: str = Field(description="The text.", examples=["I cannot help with that."])

    @property
    def text(self) -> str:
        """Return the refusal as text."""
        return self.refusal


ContentPart = Annotated[TextPart | ImagePart | RefusalPart, Field(discriminator="type")]


class CalledFunction(Body, place="chat calls"):
    """`arguments` is JSON text (OpenAI) or an object; TGI's clients call it `parameters`."""

    name: str = Field(description="The function that was called.", examples=["get_weather"])
    description: str | None = Field(default=None, description="Has no effect.", examples=["The weather"])
    arguments: Any = Field(default=None, description="JSON text or an object.", examples=['{"location":"Paris"}'])
    parameters: Any = Field(default=None, description="As `arguments`.", examples=[{"location": "Paris"}])


class ToolCall(Body, place="chat calls"):
    """A call that an earlier turn of the assistant has made."""

    id: str | None = Field(default=None, description="What the tool's answer refers to.", examples=["call_1"])
    type: str = Field(default="function", description="The kind of tool.", examples=["function"])
    function: CalledFunction = Field(
        description="What was called.", examples=[{"name": "get_weather", "arguments": '{"location":"Paris"}'}]
    )


class Message(Body, place="chat messages"):
    """One turn. `content` may be absent, in an assistant's turn that calls tools and elsewhere."""

    role: str = Field(
        min_length=1,
        max_length=64,
        description="`system`, `developer`, `user`, `assistant`, `tool`, or what else the chat template knows.",
        examples=["user"],
    )
    content: TextOrItems[ContentPart] | None = Field(
        default=None, description="A text, or parts.", examples=["Hello", [{"type": "text", "text": "Hello"}]]
    )
    refusal: str | None = Field(
        default=None, description="Read where there is no `content`.", examples=["I cannot help with that."]
    )
    tool_calls: Items[ToolCall] | None = Field(
        default=None,
        description="Calls that the assistant made in this turn.",
        examples=[[{"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}]],
    )
    tool_call_id: str | None = Field(
        default=None, description="The call that a tool's turn answers.", examples=["call_1"]
    )
    name: str | None = Field(default=None, description="Who speaks, for templates that tell.", examples=["Clara"])
    reasoning_content: str | None = Field(
        default=None, description="For templates that show earlier reasoning.", examples=["2 + 3 = 5"]
    )
    reasoning: str | None = Field(default=None, description="As `reasoning_content`.", examples=["2 + 3 = 5"])


class FunctionDefinition(Body, place="chat tools"):
    """`parameters` is a JSON schema; TGI's clients call it `arguments`."""

    name: str = Field(description="Name by which a call refers to the function.", examples=["get_weather"])
    description: str | None = Field(
        default=None, description="What the function does; the model reads it.", examples=["Get the current weather"]
    )
    parameters: Any = Field(
        default=None,
        description="JSON schema of the arguments, an object's. Absent: the function takes none.",
        examples=[{"type": "object", "properties": {"location": {"type": "string"}}}],
    )
    arguments: Any = Field(default=None, description="As `parameters`.", examples=[{"type": "object"}])
    strict: bool = Field(
        default=False,
        description="Refuse a schema that cannot be enforced, also where calls would otherwise be free.",
        examples=[True],
    )
    return_: Any = Field(
        default=None,
        alias="return",
        description="JSON schema of what it returns, for chat templates that show it.",
        examples=[{"type": "string"}],
    )

    @property
    def schema_of_parameters(self) -> Any:
        """Return the parameters' schema, if any."""
        return self.arguments if self.parameters is None else self.parameters


class Tool(Body, place="chat tools"):
    """Something that the model may call."""

    type: str = Field(
        default="function", description="The kind of tool; there are functions only.", examples=["function"]
    )
    function: FunctionDefinition = Field(description="The function.", examples=[{"name": "get_weather"}])


_KEYS_OF_CHOICE = frozenset({"type", "function", "allowed_tools"})
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather",
            "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
        },
    }
]


class ChatBody(TemplateBody, Constrained):
    """An OpenAI chat request, with TGI's and common servers' additions. `user`, `store` and the like are ignored."""

    messages: Items[Message] = Field(
        max_length=10_000,
        description="The turns so far.",
        examples=[[{"role": "user", "content": "Hello! What is 2 plus 3?"}]],
        json_schema_extra={"minItems": 1},
    )
    max_tokens: OpenAIMaxTokens = None
    max_completion_tokens: MostTokens | None = Field(
        default=None, description="As `max_tokens`, which it overrides.", examples=[20]
    )
    logprobs: bool = Field(default=False, description="Report the logprob of each token.", examples=[True])
    top_logprobs: TopLogprobs | None = Field(
        default=None,
        description="With `logprobs`: report this many of the most likely tokens at each step.",
        examples=[2],
    )
    tools: Items[Tool] | None = Field(
        default=None,
        description="Functions that the model may call.",
        examples=[_TOOLS],
    )
    tool_choice: str | dict[str, Any] | None = Field(
        default=None,
        description="`auto`, `none`, `required`, a function's name, or OpenAI's object with one.",
        examples=["auto", "none"],
    )
    parallel_tool_calls: bool = Field(
        default=True, description="`false`: the answer has at most one call.", examples=[False]
    )
    tool_prompt: str | None = Field(
        default=None,
        description="Text after the tools if the chat template does not place the tools itself.",
        examples=["Call one of these functions."],
    )

    @field_validator("tool_choice")
    @classmethod
    def _has_known_keys(cls, choice: str | dict[str, Any] | None, info: ValidationInfo) -> Any:
        if isinstance(choice, dict):
            check_keys(choice, "chat tool_choice", _KEYS_OF_CHOICE, info.context)
        return choice

    @model_validator(mode="after")
    def _is_whole(self) -> ChatBody:
        if not self.messages:
            raise FieldError("`messages` must hold at least one message", param="messages", code="empty_array")
        if self.top_logprobs and not self.logprobs:
            raise FieldError("`top_logprobs` needs `logprobs`", param="top_logprobs", reason="conflict")
        return self


class TopLogprob(BaseModel):
    """`token` is `\\xe2\\x9c` where the `bytes` are only part of a character."""

    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


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
    """Text, calls of tools, or both. The reasoning before them, if there is any, is given under two names."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class PromptTokensDetails(BaseModel):
    """`cached_tokens` came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """`reasoning_tokens` are part of the completion tokens, and there where the router reads the model's reasoning. The
    others are tokens of the request's `prediction` that were checked, in the answer or not, and there at the end of an
    answer to a request that has one."""

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(BaseModel):
    """`prompt_tokens_details` is there at the end of an answer, `completion_tokens_details` where it has fields."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


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
    service_tier: str | None = None


class FunctionDelta(BaseModel):
    name: str | None = None
    arguments: str


class CallDelta(BaseModel):
    """`id`, `type` and the function's `name` come once; join the pieces of `arguments`."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
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
    service_tier: str | None = None
