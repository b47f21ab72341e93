"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`, in the form of Anthropic's API."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from router.api.messages.blocks import Block, TextBlock
from router.api.messages.edits import ContextManagement
from router.errors import FieldError
from router.schemas.base import Body, Items, TextOrItems, UInt32
from router.schemas.guided import Constrained
from router.schemas.openai import OpenAIParameters, TemplateVariables, check_callers
from router.schemas.other_fields import Family
from router.schemas.parameters import PositiveInt, Stream


class InputMessage(Body, place="messages messages"):
    """One turn."""

    role: Literal["user", "assistant", "system"] = Field(description="Who speaks.", examples=["user"])
    content: TextOrItems[Block] = Field(description="A text, or blocks.", examples=["Hello"])


class MessagesTool(Body, place="messages tools"):
    """A tool of the client. Tools of Anthropic's servers (whose `type` names a version) are left out."""

    type: str = Field(default="custom", description="`custom` or absent.", examples=["custom"])
    name: str = Field(description="Name by which a call refers to the tool.", examples=["get_weather"])
    description: str | None = Field(default=None, description="What the tool does.", examples=["The weather of a city"])
    input_schema: dict[str, Any] | None = Field(
        default=None, description="JSON schema of the arguments.", examples=[{"type": "object", "properties": {}}]
    )
    strict: bool = Field(default=False, description="As in the chat route.", examples=[False])
    input_examples: Items[dict[str, Any]] = Field(
        default_factory=list,
        description="Arguments as the tool takes them; the model reads them behind the description.",
        examples=[[{"city": "Paris"}]],
    )
    defer_loading: bool = Field(
        default=False,
        description="`true`: the model sees the tool once a `tool_reference` names it, or at once where a search of "
        "Anthropic's servers would find it.",
        examples=[False],
    )
    allowed_callers: Items[str] = Field(
        default=["direct"], description="Must hold `direct`: the model calls all tools itself.", examples=[["direct"]]
    )

    @model_validator(mode="before")
    @classmethod
    def _is_whole_only_if_served(cls, data: Any) -> Any:
        """Leave out the fields of what is left out."""
        if isinstance(data, dict) and isinstance(kind := data.get("type"), str) and kind != "custom":
            return {name: data[name] for name in ("type", "name") if name in data}
        return data

    @model_validator(mode="after")
    def _is_called_by_the_model(self) -> MessagesTool:
        check_callers(self.allowed_callers)
        return self


class MessagesToolChoice(Body):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"] = Field(description="`tool` needs `name`.", examples=["auto"])
    name: str | None = Field(default=None, description="The tool to call.", examples=["get_weather"])
    disable_parallel_tool_use: bool = Field(default=False, description="At most one call.", examples=[True])

    @model_validator(mode="after")
    def _has_its_name(self) -> MessagesToolChoice:
        if self.type == "tool" and self.name is None:
            text = "`tool_choice` of the type `tool` needs `name`"
            raise FieldError(text, param="name", reason="missing_field")
        return self


class Thinking(Body, place="messages thinking"):
    """Whether the model thinks before it answers, for chat templates that let it be chosen."""

    type: Literal["enabled", "adaptive", "disabled"] = Field(
        description="`adaptive` leaves it to the model.", examples=["enabled"]
    )
    budget_tokens: UInt32 | None = Field(
        default=None,
        description="Most tokens of reasoning before the answer begins; less than `max_tokens`.",
        examples=[1024],
    )
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="`omitted`: blocks of thinking are empty; else they are whole.", examples=["omitted"]
    )


class OutputFormat(Body):
    """A form that the answer must have."""

    type: Literal["json_schema"] = Field(description="The only form.", examples=["json_schema"])
    schema_: dict[str, Any] = Field(alias="schema", description="A JSON schema.", examples=[{"type": "object"}])


class OutputConfig(Body, place="messages output_config"):
    """Effort and form of the answer."""

    effort: str | None = Field(default=None, description="The template's `reasoning_effort`.", examples=["low"])
    format: OutputFormat | None = Field(
        default=None,
        description="Constrains the answer if it calls no tool.",
        examples=[{"type": "json_schema", "schema": {"type": "object"}}],
    )


class MessagesMetadata(Body):
    """What is known of the sender."""

    user_id: str | None = Field(default=None, description="Has no effect.", examples=["a-user"])


class CountTokensBody(Body):
    """A conversation whose prompt is counted."""

    family: ClassVar[Family | None] = "messages"

    model: str = Field(description="Any name, or that of a LoRA adapter.", examples=["tgi"])
    messages: Items[InputMessage] = Field(
        max_length=10_000,
        description="The turns so far.",
        examples=[[{"role": "user", "content": "Hello! What is 2 plus 3?"}]],
        json_schema_extra={"minItems": 1},
    )
    system: TextOrItems[TextBlock] | None = Field(
        default=None, description="A text, or blocks, before the first turn.", examples=["You are brief."]
    )
    tools: Items[MessagesTool] | None = Field(
        default=None,
        description="Tools that the model may call.",
        examples=[[{"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}]],
    )
    tool_choice: MessagesToolChoice | None = Field(
        default=None, description="Absent: `auto`.", examples=[{"type": "auto"}]
    )
    thinking: Thinking | None = Field(
        default=None, description="Absent: as the chat template does by itself.", examples=[{"type": "disabled"}]
    )
    output_config: OutputConfig | None = Field(
        default=None, description="Effort and form of the answer.", examples=[{"effort": "low"}]
    )

    context_management: ContextManagement | None = Field(
        default=None,
        description="Clears earlier results of tools, and thinking.",
        examples=[{"edits": [{"type": "clear_tool_uses_20250919"}]}],
    )
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_messages(self) -> CountTokensBody:
        if not self.messages:
            raise FieldError("`messages` must hold at least one message", param="messages", code="empty_array")
        return self


class MessagesBody(OpenAIParameters, Constrained, CountTokensBody):
    """A request of Anthropic's Messages API, with the parameters of chats. `diagnostics` and the like are ignored."""

    max_tokens: PositiveInt = Field(description="Most tokens to generate, reasoning included.", examples=[20])
    stop_sequences: Items[str] = Field(
        default_factory=list, description="Texts at which the answer ends; they are left out.", examples=[["\n\n"]]
    )
    stream: Stream = False
    metadata: MessagesMetadata | None = Field(
        default=None, description="What is known of the sender.", examples=[{"user_id": "a-user"}]
    )
    service_tier: Literal["auto", "standard_only"] | None = Field(
        default=None, description="Both are served alike; `priority` says whose turn it is.", examples=["auto"]
    )

    @model_validator(mode="after")
    def _thinks_within_its_tokens(self) -> MessagesBody:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            text = f"`max_tokens` must be greater than `thinking.budget_tokens`. Given: {self.max_tokens} and {budget}"
            raise FieldError(text, param="max_tokens")
        return self


class MessagesUsage(BaseModel):
    """Numbers of tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation: None = None
    inference_geo: None = None
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"


class AnsweredBlock(BaseModel):
    """`text` has `text`; `thinking` has `thinking` and an empty `signature`; `tool_use` has `id`, `name`, `input`."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class AppliedEdit(BaseModel):
    """One of the two numbers, by the kind of edit."""

    type: str
    cleared_tool_uses: int | None = None
    cleared_thinking_turns: int | None = None
    cleared_input_tokens: int


class AppliedEdits(BaseModel):
    applied_edits: list[AppliedEdit]


class AnsweredMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: Literal["end_turn", "tool_use", "max_tokens", "stop_sequence"] | None
    stop_sequence: str | None
    container: None = None
    stop_details: None = None
    usage: MessagesUsage
    # Only if the request has the field.
    context_management: AppliedEdits | None = None


class MessageEvent(BaseModel):
    """One event of a stream: `event:` repeats its `type`. `message_stop` is the last one."""

    type: Literal[
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop", "error",
    ]  # fmt: skip


class UneditedCount(BaseModel):
    original_input_tokens: int


class TokenCount(BaseModel):
    input_tokens: int
    # Only if the request has the field.
    context_management: UneditedCount | None = None
