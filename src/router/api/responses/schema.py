"""Bodies of `/v1/responses`, in the form of OpenAI's Responses API."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from router.api.responses.input_items import LOGPROBS, Included, Item, ResponsesTool
from router.errors import FieldError
from router.schemas.base import Body, Items, TextOrItems, check_keys
from router.schemas.guided import Constrained
from router.schemas.openai import TemplateVariables, ThinkingBudget, TieredParameters
from router.schemas.other_fields import Family
from router.schemas.parameters import Model, MostTokens, OpenAIStop, Stream, TopLogprobs


class TextFormat(Body):
    """A form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        default="text", description="`json_schema` needs `schema`.", examples=["text"]
    )
    name: str | None = Field(default=None, description="Has no effect.", examples=["person"])
    description: str | None = Field(default=None, description="Has no effect.", examples=["A person"])
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="A JSON schema.", examples=[{"type": "object"}]
    )
    strict: bool = Field(default=True, description="Has no effect: the form is always enforced.", examples=[True])

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise FieldError("`schema` belongs to the type `json_schema`, which needs it", param="schema")
        return self


class TextConfig(Body):
    """Form of the answer."""

    format: TextFormat = Field(
        default=TextFormat(),
        description="Constrains the answer if it calls no tool.",
        examples=[{"type": "json_schema", "name": "any", "schema": {"type": "object"}}],
    )
    verbosity: str | None = Field(default=None, description="Has no effect.", examples=["low"])


class ReasoningConfig(Body, place="responses reasoning"):
    """How much the model thinks before it answers."""

    effort: str | None = Field(default=None, description="The template's `reasoning_effort`.", examples=["low"])
    summary: str | None = Field(default=None, description="Has no effect: reasoning is given whole.", examples=["auto"])
    context: Literal["auto", "current_turn", "all_turns"] | None = Field(
        default=None,
        description="`current_turn` leaves out reasoning before the last message of the user; else the chat template "
        "decides what the model sees of it.",
        examples=["current_turn"],
    )


class ResponsesStreamOptions(Body, place="responses stream_options"):
    """What a stream has in addition; here nothing."""


_KEYS_OF_CHOICE = frozenset({"type", "name", "namespace", "mode", "tools", "server_label"})
_MOST_METADATA, _LONGEST_NAME, _LONGEST_TEXT = 16, 64, 512  # OpenAI's


class ResponsesBody(TieredParameters, Constrained):
    """A request of OpenAI's Responses API, with the parameters of chats. `user`, `prompt_cache_key` and the like are
    ignored."""

    family: ClassVar[Family | None] = "responses"

    input: TextOrItems[Item] = Field(description="A text, or the conversation.", examples=["What is 2 plus 3?"])
    model: Model = None
    instructions: str | None = Field(default=None, description="The first system turn.", examples=["You are brief."])
    tools: Items[ResponsesTool] = Field(
        default_factory=list,
        description="Tools that the model may call.",
        examples=[[{"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}]],
    )
    tool_choice: str | dict[str, Any] = Field(
        default="auto",
        description='`auto`, `none`, `required`, or `{"type": "function", "name": ...}`.',
        examples=["auto"],
    )
    parallel_tool_calls: bool = Field(default=True, description="`false`: at most one call.", examples=[False])
    text: TextConfig = Field(default=TextConfig(), description="What the answer must look like.", examples=[{}])
    reasoning: ReasoningConfig = Field(
        default=ReasoningConfig(), description="Effort of reasoning.", examples=[{"effort": "low"}]
    )
    include: Items[Included] = Field(
        default_factory=list,
        description="`reasoning.encrypted_content` gives reasoning in the form that may be sent back, "
        "`message.output_text.logprobs` the logprobs of texts; the others are of items that there are not.",
        examples=[["reasoning.encrypted_content"]],
    )
    top_logprobs: TopLogprobs | None = Field(
        default=None,
        description="With `message.output_text.logprobs` in `include`: report this many of the most likely tokens at "
        "each step.",
        examples=[2],
    )
    max_output_tokens: MostTokens | None = Field(
        default=None,
        description="Most tokens to generate, reasoning included. -1 or absent: as many as fit.",
        examples=[20],
    )
    stop: OpenAIStop = None
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    thinking_token_budget: ThinkingBudget = None
    stream: Stream = False
    stream_options: ResponsesStreamOptions | None = Field(
        default=None, description="Has no fields that are served.", examples=[{}]
    )
    previous_response_id: str | None = Field(
        default=None,
        description="A stored response whose conversation this one continues. Needs a server with `--response-store`.",
        examples=[None],
    )
    store: bool = Field(
        default=True,
        description="Keep the response, on a server with `--response-store`; the answer says whether it is kept.",
        examples=[False],
    )
    metadata: dict[str, str] = Field(
        default_factory=dict,
        description="Comes back in the answer: up to 16 texts of 512 characters, their names of 64.",
        examples=[{"session": "1"}],
    )

    @field_validator("tool_choice")
    @classmethod
    def _has_known_keys(cls, choice: str | dict[str, Any], info: ValidationInfo) -> Any:
        if isinstance(choice, dict):
            check_keys(choice, "responses tool_choice", _KEYS_OF_CHOICE, info.context)
        return choice

    @model_validator(mode="after")
    def _is_whole(self) -> ResponsesBody:
        if not self.input and isinstance(self.input, list):
            raise FieldError("`input` must hold at least one item", param="input", code="empty_array")
        if self.top_logprobs and LOGPROBS not in self.include:
            text = f"`top_logprobs` needs `{LOGPROBS}` in `include`"
            raise FieldError(text, param="top_logprobs", reason="conflict")
        if len(self.metadata) > _MOST_METADATA or any(
            len(name) > _LONGEST_NAME or len(text) > _LONGEST_TEXT for name, text in self.metadata.items()
        ):
            text = f"`metadata` may hold {_MOST_METADATA} texts of {_LONGEST_TEXT} characters, names of {_LONGEST_NAME}"
            raise FieldError(text, param="metadata")
        return self


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(BaseModel):
    """`output` holds items of the types `reasoning`, `message`, `function_call`, `custom_tool_call` and
    `tool_search_call`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    usage: ResponseUsage | None
    previous_response_id: str | None
    store: bool
    service_tier: str | None = None


class ResponseEvent(BaseModel):
    """One event of a stream: `event:` repeats its `type`. There is no `[DONE]`."""

    type: str
    sequence_number: int


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(BaseModel):
    """A page of the items of a stored response's conversation, its answer not included."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
