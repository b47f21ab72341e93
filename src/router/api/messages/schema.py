"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`, in the form of Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from router.errors import FieldError
from router.schemas.base import Body, Items, TextOrItems, UInt32
from router.schemas.guided import Constrained
from router.schemas.openai import OpenAIParameters, TemplateVariables
from router.schemas.other_fields import Family
from router.schemas.parameters import PositiveInt, Stream


class TextBlock(Body):
    """A text."""

    type: Literal["text"] = Field(description="The kind of block.", examples=["text"])
    text: str = Field(description="Blocks of text are joined as they are.", examples=["Hello"])


class ImageSource(Body):
    """The address or data of an image."""

    type: Literal["base64", "url"] = Field(description="`base64` with `data`, or `url`.", examples=["url"])
    media_type: str = Field(default="image/png", description="Of `data`.", examples=["image/png"])
    data: str | None = Field(default=None, description="The image in base64.", examples=["iVBORw0KGgo="])
    url: str | None = Field(default=None, description="An address.", examples=["https://example.com/a.png"])

    @model_validator(mode="after")
    def _has_an_image(self) -> ImageSource:
        if (self.data if self.type == "base64" else self.url) is None:
            name = "data" if self.type == "base64" else "url"
            text = f"a source of the type `{self.type}` needs `{name}`"
            raise FieldError(text, param=name, reason="missing_field")
        return self


class ImageBlock(Body):
    """An image, served as far as the chat route serves images."""

    type: Literal["image"] = Field(description="The kind of block.", examples=["image"])
    source: ImageSource = Field(
        description="The image.", examples=[{"type": "url", "url": "https://example.com/a.png"}]
    )


class ToolUseBlock(Body):
    """A call that an earlier turn of the assistant has made."""

    type: Literal["tool_use"] = Field(description="The kind of block.", examples=["tool_use"])
    id: str = Field(min_length=1, description="What the tool's result refers to.", examples=["toolu_1"])
    name: str = Field(description="The tool that was called.", examples=["get_weather"])
    input: dict[str, Any] = Field(description="Its arguments.", examples=[{"city": "Paris"}])


class Citations(Body):
    """Citations of documents, which are not served."""

    enabled: bool = Field(default=False, description="`true` is refused.", examples=[False])

    @model_validator(mode="after")
    def _are_off(self) -> Citations:
        if self.enabled:
            text = "citations are not served: leave `citations` out and ask for quotations in the prompt"
            raise FieldError(text, param="enabled", reason="unsupported")
        return self


class SearchResultBlock(Body):
    """What the client has found; the model reads its title, source and texts."""

    type: Literal["search_result"] = Field(description="The kind of block.", examples=["search_result"])
    source: str = Field(description="Where it is from.", examples=["https://example.com/a"])
    title: str = Field(description="Its title.", examples=["Weather"])
    content: list[TextBlock] = Field(description="Its texts.", examples=[[{"type": "text", "text": "Sunny"}]])
    citations: Citations | None = Field(default=None, description="Absent: none.", examples=[{"enabled": False}])


class DocumentSource(Body):
    """The content of a document, which is in the request itself."""

    type: Literal["text", "content", "base64", "url", "file"] = Field(
        description="`text` with `data`, or `content` with `content`; files, PDFs among them, are refused.",
        examples=["text"],
    )
    data: str | None = Field(default=None, description="The text.", examples=["Paris has 2.1 million inhabitants."])
    content: TextOrItems[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] | None = Field(
        default=None, description="A text, or blocks.", examples=[[{"type": "text", "text": "Paris"}]]
    )

    @model_validator(mode="after")
    def _has_a_text(self) -> DocumentSource:
        if self.type not in ("text", "content"):
            text = "documents are read as text alone, no files: send what is in it with a source of the type `text`"
            raise FieldError(text, param="type", reason="unsupported")
        name = "data" if self.type == "text" else "content"
        if (self.data if self.type == "text" else self.content) is None:
            text = f"a source of the type `{self.type}` needs `{name}`"
            raise FieldError(text, param=name, reason="missing_field")
        return self


class DocumentBlock(Body):
    """A document of the client; the model reads its title, what is said of it, and its content."""

    type: Literal["document"] = Field(description="The kind of block.", examples=["document"])
    source: DocumentSource = Field(description="The document.", examples=[{"type": "text", "data": "Paris"}])
    title: str | None = Field(default=None, description="Its title.", examples=["Cities"])
    context: str | None = Field(default=None, description="What is said of it.", examples=["From an atlas."])
    citations: Citations | None = Field(default=None, description="Absent: none.", examples=[{"enabled": False}])


class ToolReferenceBlock(Body):
    """A tool that a search for tools has found; the model reads its name."""

    type: Literal["tool_reference"] = Field(description="The kind of block.", examples=["tool_reference"])
    tool_name: str = Field(description="One of `tools`.", examples=["get_weather"])


class ServerToolUseBlock(Body):
    """A call of a tool on Anthropic's or MCP's servers, in an earlier turn; the model reads it as text."""

    type: Literal["server_tool_use", "mcp_tool_use"] = Field(
        description="The kind of block.", examples=["server_tool_use"]
    )
    name: str = Field(description="The tool.", examples=["web_search"])
    input: dict[str, Any] = Field(default_factory=dict, description="Its arguments.", examples=[{"query": "Paris"}])


class ServerToolResultBlock(Body):
    """What such a tool has answered; the model reads the texts, titles and addresses in it."""

    type: Literal[
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_result",
    ] = Field(description="The kind of block.", examples=["web_search_tool_result"])
    content: Any = Field(default=None, description="The result.", examples=[[{"title": "Paris", "url": "https://a"}]])


class ToolResultBlock(Body):
    """What a tool has answered."""

    type: Literal["tool_result"] = Field(description="The kind of block.", examples=["tool_result"])
    tool_use_id: str = Field(min_length=1, description="The call that this answers.", examples=["toolu_1"])
    content: TextOrItems[
        Annotated[
            TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock,
            Field(discriminator="type"),
        ]
    ] = Field(default="", description="A text, or blocks.", examples=["18 degrees"])
    is_error: bool = Field(default=False, description="The model reads `Error: ` before the text.", examples=[False])


class ThinkingBlock(Body):
    """Reasoning of an earlier turn; the chat template decides whether the model sees it again."""

    type: Literal["thinking"] = Field(description="The kind of block.", examples=["thinking"])
    thinking: str = Field(description="The text.", examples=["2 + 3 = 5"])


class RedactedThinkingBlock(Body):
    """Left out: only the server that wrote it could read it."""

    type: Literal["redacted_thinking"] = Field(description="The kind of block.", examples=["redacted_thinking"])


Block = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolReferenceBlock
    | ServerToolUseBlock
    | ServerToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock,
    Field(discriminator="type"),
]


class InputMessage(Body):
    """One turn."""

    role: Literal["user", "assistant", "system"] = Field(description="Who speaks.", examples=["user"])
    content: TextOrItems[Block] = Field(description="A text, or blocks.", examples=["Hello"])


class MessagesTool(Body):
    """A tool of the client. Tools of Anthropic's servers (whose `type` names a version) are left out."""

    type: str = Field(default="custom", description="`custom` or absent.", examples=["custom"])
    name: str = Field(description="Name by which a call refers to the tool.", examples=["get_weather"])
    description: str | None = Field(default=None, description="What the tool does.", examples=["The weather of a city"])
    input_schema: dict[str, Any] | None = Field(
        default=None, description="JSON schema of the arguments.", examples=[{"type": "object", "properties": {}}]
    )
    strict: bool = Field(default=False, description="As in the chat route.", examples=[False])


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


class Thinking(Body):
    """Whether the model thinks before it answers, for chat templates that let it be chosen."""

    type: Literal["enabled", "adaptive", "disabled"] = Field(
        description="`adaptive` leaves it to the model.", examples=["enabled"]
    )
    budget_tokens: UInt32 | None = Field(
        default=None,
        description="Most tokens of reasoning before the answer begins; less than `max_tokens`.",
        examples=[1024],
    )


class OutputFormat(Body):
    """A form that the answer must have."""

    type: Literal["json_schema"] = Field(description="The only form.", examples=["json_schema"])
    schema_: dict[str, Any] = Field(alias="schema", description="A JSON schema.", examples=[{"type": "object"}])


class OutputConfig(Body):
    """Effort and form of the answer."""

    effort: str | None = Field(default=None, description="The template's `reasoning_effort`.", examples=["low"])
    format: OutputFormat | None = Field(
        default=None,
        description="Constrains the answer if it calls no tool.",
        examples=[{"type": "json_schema", "schema": {"type": "object"}}],
    )


class Threshold(Body):
    """A number of tokens of the prompt, or of calls."""

    type: Literal["input_tokens", "tool_uses"] = Field(description="What is counted.", examples=["input_tokens"])
    value: UInt32 = Field(description="The number.", examples=[100_000])


class KeptCalls(Body):
    """Calls whose results stay."""

    type: Literal["tool_uses"] = Field(description="What is counted.", examples=["tool_uses"])
    value: UInt32 = Field(description="The last ones.", examples=[3])


class LeastCleared(Body):
    """Tokens that are worth it."""

    type: Literal["input_tokens"] = Field(description="What is counted.", examples=["input_tokens"])
    value: UInt32 = Field(description="If it saves fewer, nothing is cleared.", examples=[5000])


class ClearToolUses(Body):
    """Clears the results of earlier calls when the prompt is long; the calls stay."""

    type: Literal["clear_tool_uses_20250919"] = Field(
        description="The kind of edit.", examples=["clear_tool_uses_20250919"]
    )
    trigger: Threshold = Field(
        default=Threshold(type="input_tokens", value=100_000),
        description="Nothing is cleared up to it.",
        examples=[{"type": "input_tokens", "value": 30_000}],
    )
    keep: KeptCalls = Field(
        default=KeptCalls(type="tool_uses", value=3),
        description="The last calls keep their results.",
        examples=[{"type": "tool_uses", "value": 3}],
    )
    clear_at_least: LeastCleared | None = Field(
        default=None, description="Absent: any number.", examples=[{"type": "input_tokens", "value": 5000}]
    )
    exclude_tools: Items[str] = Field(
        default_factory=list, description="Tools whose results always stay.", examples=[["memory"]]
    )
    clear_tool_inputs: bool | list[str] | None = Field(
        default=False, description="Also clears the arguments, of all tools or of these.", examples=[True]
    )

    def clears_input_of(self, tool: str) -> bool:
        """Whether a tool's arguments are cleared, too."""
        cleared = self.clear_tool_inputs
        return tool in cleared if isinstance(cleared, list) else bool(cleared)


class KeptThinking(Body):
    """Turns that keep their thinking."""

    type: Literal["thinking_turns", "all"] = Field(description="What is counted.", examples=["thinking_turns"])
    value: PositiveInt | None = Field(default=None, description="The last ones.", examples=[1])

    @model_validator(mode="after")
    def _has_its_number(self) -> KeptThinking:
        if self.type == "thinking_turns" and self.value is None:
            raise FieldError("`thinking_turns` needs `value`", param="value", reason="missing_field")
        return self


class ClearThinking(Body):
    """Leaves out the thinking of earlier turns. What stays, the chat template may leave out, too."""

    type: Literal["clear_thinking_20251015"] = Field(
        description="The kind of edit.", examples=["clear_thinking_20251015"]
    )
    keep: KeptThinking | Literal["all"] = Field(
        default=KeptThinking(type="thinking_turns", value=1), description="Absent: the last turn's.", examples=["all"]
    )

    @property
    def kept_turns(self) -> int | None:
        """Turns that keep their thinking; None: all."""
        return None if isinstance(self.keep, str) else self.keep.value


class ContextManagement(Body):
    """Edits of the conversation before the model reads it. Compaction (`compact_20260112`) is refused."""

    edits: Items[Annotated[ClearToolUses | ClearThinking, Field(discriminator="type")]] = Field(
        default_factory=list,
        max_length=16,
        description="In their order.",
        examples=[[{"type": "clear_tool_uses_20250919"}]],
    )

    @field_validator("edits", mode="before")
    @classmethod
    def _are_served(cls, edits: Any) -> Any:
        for one in edits if isinstance(edits, list) else ():
            if isinstance(one, dict) and str(one.get("type")).startswith("compact_"):
                text = f"`{one['type']}` is not served: shorten the conversation in the client"
                raise FieldError(text, reason="unsupported")
        return edits


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
    """A request of Anthropic's Messages API, with the parameters of chats. `metadata` and the like are ignored."""

    max_tokens: PositiveInt = Field(description="Most tokens to generate, reasoning included.", examples=[20])
    stop_sequences: Items[str] = Field(
        default_factory=list, description="Texts at which the answer ends; they are left out.", examples=[["\n\n"]]
    )
    stream: Stream = False
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
