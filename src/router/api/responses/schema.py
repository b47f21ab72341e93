"""Bodies of `/v1/responses`, in the form of OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from router.errors import FieldError
from router.schemas.base import Body, Items, TextOrItems
from router.schemas.guided import Constrained
from router.schemas.openai import TemplateVariables, ThinkingBudget, TieredParameters
from router.schemas.other_fields import Family
from router.schemas.parameters import Model, MostTokens, OpenAIStop, Stream, TopLogprobs


class InputText(Body):
    """A text of the conversation."""

    type: Literal["input_text", "output_text", "text", "refusal"] = Field(
        description="The kind of part.", examples=["input_text"]
    )
    text: str = Field(default="", description="Parts are joined as they are.", examples=["Hello"])
    refusal: str = Field(default="", description="The text of a `refusal`.", examples=["No."])


class InputImage(Body):
    """An image, served as far as the chat route serves images."""

    type: Literal["input_image"] = Field(description="The kind of part.", examples=["input_image"])
    image_url: str = Field(description="An address or a data URL.", examples=["https://example.com/a.png"])
    detail: Literal["auto", "high", "low"] | None = Field(
        default=None, description="As in the chat route.", examples=["low"]
    )


InputPart = Annotated[InputText | InputImage, Field(discriminator="type")]
Parts = TextOrItems[InputPart]


class StoredItem(Body):
    """What clients have of an item that they got or made."""

    id: str | None = Field(default=None, description="Kept where the response is stored.", examples=["msg_1"])
    status: Literal["in_progress", "completed", "incomplete"] | None = Field(
        default=None, description="Kept where the response is stored.", examples=["completed"]
    )


class MessageItem(StoredItem):
    """One turn."""

    type: Literal["message"] = Field(default="message", description="The kind of item.", examples=["message"])
    role: Literal["user", "assistant", "system", "developer"] = Field(description="Who speaks.", examples=["user"])
    content: Parts = Field(description="A text, or parts.", examples=["Hello"])


class CallItem(StoredItem):
    """A call of a function that an earlier turn has made."""

    type: Literal["function_call"] = Field(description="The kind of item.", examples=["function_call"])
    call_id: str = Field(description="What the output refers to.", examples=["call_1"])
    name: str = Field(description="The function.", examples=["get_weather"])
    arguments: str = Field(description="JSON text.", examples=['{"city": "Paris"}'])
    namespace: str | None = Field(default=None, description="Where the function comes from.", examples=["mcp__docs"])


class CustomCallItem(StoredItem):
    """A call of a custom tool that an earlier turn has made."""

    type: Literal["custom_tool_call"] = Field(description="The kind of item.", examples=["custom_tool_call"])
    call_id: str = Field(description="What the output refers to.", examples=["call_1"])
    name: str = Field(description="The tool.", examples=["apply_patch"])
    input: str = Field(description="A text.", examples=["*** Begin Patch"])
    namespace: str | None = Field(default=None, description="Where the tool comes from.", examples=["functions"])


class CallOutputItem(StoredItem):
    """What a tool has answered."""

    type: Literal["function_call_output", "custom_tool_call_output"] = Field(
        description="The kind of item.", examples=["function_call_output"]
    )
    call_id: str = Field(description="The call that this answers.", examples=["call_1"])
    output: Parts = Field(description="A text, or parts.", examples=["18 degrees"])


class SearchCallItem(StoredItem):
    """A call of the client's `tool_search` that an earlier turn has made."""

    type: Literal["tool_search_call"] = Field(description="The kind of item.", examples=["tool_search_call"])
    call_id: str | None = Field(
        default=None, description="What the output refers to. Absent: a search of another server, which is left out.",
        examples=["call_1"],
    )  # fmt: skip
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="What was searched for.", examples=[{"query": "calendar"}]
    )
    execution: Literal["server", "client"] = Field(default="client", description="Who searches.", examples=["client"])


class ReasoningText(Body):
    """A piece of reasoning."""

    type: str = Field(default="reasoning_text", description="The kind of part.", examples=["reasoning_text"])
    text: str = Field(description="The text.", examples=["2 + 3 = 5"])


class ReasoningItem(StoredItem):
    """Reasoning of an earlier turn; the chat template decides whether the model sees it again."""

    type: Literal["reasoning"] = Field(description="The kind of item.", examples=["reasoning"])
    content: Items[ReasoningText] = Field(
        default_factory=list, description="Its text.", examples=[[{"type": "reasoning_text", "text": "2 + 3 = 5"}]]
    )
    encrypted_content: str | None = Field(
        default=None, description="As this server has written it; read where `content` is empty.", examples=["…"]
    )
    summary: Items[dict[str, Any]] = Field(
        default_factory=list, description="Kept where the response is stored.", examples=[[]]
    )


class ItemReference(Body):
    """An item of a response that is stored, or of its request. Needs a server with `--response-store`."""

    type: Literal["item_reference"] = Field(
        default="item_reference", description="The kind of item.", examples=["item_reference"]
    )
    id: str = Field(description="Of the item.", examples=["msg_1"])


class ResponsesTool(Body):
    """A `function`, a `custom` tool, a `namespace` of both, or a `tool_search` of the client. Tools of OpenAI's servers
    are left out."""

    type: str = Field(description="The kind of tool.", examples=["function"])
    name: str | None = Field(default=None, description="Name by which a call refers to it.", examples=["get_weather"])
    description: str | None = Field(default=None, description="What it does.", examples=["The weather of a city"])
    parameters: dict[str, Any] | None = Field(
        default=None,
        description="JSON schema of a function's arguments.",
        examples=[{"type": "object", "properties": {}}],
    )
    strict: bool = Field(default=False, description="As in the chat route.", examples=[False])
    format: dict[str, Any] | None = Field(
        default=None, description="Of a `custom` tool's input. Only `text` is enforced.", examples=[{"type": "text"}]
    )
    tools: Items[ResponsesTool] = Field(default_factory=list, description="Of a `namespace`.", examples=[[]])
    execution: str | None = Field(
        default=None, description="Of a `tool_search`: served where it is `client`.", examples=["client"]
    )

    @model_validator(mode="after")
    def _has_its_name(self) -> ResponsesTool:
        if self.type in ("function", "custom", "namespace") and not self.name:
            text = f"a tool of the type `{self.type}` needs `name`"
            raise FieldError(text, param="name", reason="missing_field")
        return self


class AdditionalToolsItem(StoredItem):
    """Tools beside those of `tools`."""

    type: Literal["additional_tools"] = Field(description="The kind of item.", examples=["additional_tools"])
    role: Literal["developer"] = Field(default="developer", description="Who gives them.", examples=["developer"])
    tools: Items[ResponsesTool] = Field(description="As in the body's `tools`.", examples=[[]])


class SearchOutputItem(StoredItem):
    """What the client's `tool_search` has found: tools beside those of `tools`."""

    type: Literal["tool_search_output"] = Field(description="The kind of item.", examples=["tool_search_output"])
    call_id: str | None = Field(default=None, description="The call that this answers.", examples=["call_1"])
    execution: Literal["server", "client"] = Field(default="client", description="Who searched.", examples=["client"])
    tools: Items[ResponsesTool] = Field(description="As in the body's `tools`.", examples=[[]])


def _kind(value: Any) -> Any:
    """Return an item's type; messages and references may lack it."""
    if isinstance(value, dict) and value.keys() == {"id"}:
        return "item_reference"
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message")
    return "function_call_output" if kind == "custom_tool_call_output" else kind


_Message = Annotated[MessageItem, Tag("message")]
_Call = Annotated[CallItem, Tag("function_call")]
_CustomCall = Annotated[CustomCallItem, Tag("custom_tool_call")]
_Output = Annotated[CallOutputItem, Tag("function_call_output")]
_Reasoning = Annotated[ReasoningItem, Tag("reasoning")]
_Reference = Annotated[ItemReference, Tag("item_reference")]
_Tools = Annotated[AdditionalToolsItem, Tag("additional_tools")]
_Search = Annotated[SearchCallItem, Tag("tool_search_call")]
_Found = Annotated[SearchOutputItem, Tag("tool_search_output")]
Item = Annotated[
    _Message | _Call | _CustomCall | _Output | _Reasoning | _Reference | _Tools | _Search | _Found,
    Discriminator(_kind),
]


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


class ReasoningConfig(Body):
    """How much the model thinks before it answers."""

    effort: str | None = Field(default=None, description="The template's `reasoning_effort`.", examples=["low"])
    summary: str | None = Field(default=None, description="Has no effect: reasoning is given whole.", examples=["auto"])
    context: Literal["auto", "current_turn", "all_turns"] | None = Field(
        default=None,
        description="`current_turn` leaves out reasoning before the last message of the user; else the chat template "
        "decides what the model sees of it.",
        examples=["current_turn"],
    )


LOGPROBS: Final = "message.output_text.logprobs"
Included = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
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
