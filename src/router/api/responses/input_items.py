"""Items of a response's input, the tools that they and bodies name, and what answers include."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema

from router.errors import FieldError
from router.schemas.base import Body, Items, TextOrItems
from router.schemas.openai import check_callers


class InputText(Body, place="responses content"):
    """A text of the conversation."""

    type: Literal["input_text", "output_text", "text", "refusal"] = Field(
        description="The kind of part.", examples=["input_text"]
    )
    text: str = Field(default="", description="Parts are joined as they are.", examples=["Hello"])
    refusal: str = Field(default="", description="The text of a `refusal`.", examples=["No."])


class InputImage(Body, place="responses content"):
    """An image, served as far as the chat route serves images."""

    type: Literal["input_image"] = Field(description="The kind of part.", examples=["input_image"])
    image_url: str = Field(description="An address or a data URL.", examples=["https://example.com/a.png"])
    detail: Literal["auto", "high", "low"] | None = Field(
        default=None, description="As in the chat route.", examples=["low"]
    )


InputPart = Annotated[InputText | InputImage, Field(discriminator="type")]
Parts = TextOrItems[InputPart]


class StoredItem(Body, place="responses input"):
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


class ReasoningText(Body, place="responses content"):
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


class HostedItem(Body, place="responses input"):
    """A call of a tool on OpenAI's servers with what it has found, in an earlier turn. The model reads its other fields
    as text; those that are empty or pictures are not kept."""

    type: Literal[
        "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call",
        "mcp_list_tools",
    ] = Field(description="The kind of item.", examples=["web_search_call"])  # fmt: skip
    id: str | None = Field(default=None, description="Kept where the response is stored.", examples=["ws_1"])
    status: str | None = Field(default=None, description="Kept as it is, likewise.", examples=["failed"])
    said: SkipJsonSchema[dict[str, Any]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _says_what_texts_have(cls, data: Any) -> Any:
        """Gather the other fields, whatever their names; none of the client's is `said`."""
        if not isinstance(data, dict):
            return data
        others = {} if data.get("type") == "mcp_list_tools" else _without_pictures(data)
        said = {name: value for name, value in others.items() if name not in _OF_HOSTED | _UNREAD and value}
        return {name: data.get(name) for name in _OF_HOSTED} | {"said": said}


_OF_HOSTED = frozenset({"type", "id", "status"})
_UNREAD = frozenset({"result", "container_id", "approval_request_id"})
_DATA_URL = re.compile(r"data:[^\s,]*,")


def _without_pictures(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_pictures(one) for name, one in value.items() if not _is_picture(one)}
    return [_without_pictures(one) for one in value if not _is_picture(one)] if isinstance(value, list) else value


def _is_picture(value: Any) -> bool:
    is_part = isinstance(value, dict) and value.get("type") == "image"
    return is_part or (isinstance(value, str) and _DATA_URL.match(value) is not None)


class ItemReference(Body):
    """An item of a response that is stored, or of its request. Needs a server with `--response-store`."""

    type: Literal["item_reference"] = Field(
        default="item_reference", description="The kind of item.", examples=["item_reference"]
    )
    id: str = Field(description="Of the item.", examples=["msg_1"])


_SERVED_TOOLS = ("function", "custom", "namespace", "tool_search")


class ResponsesTool(Body, place="responses tools"):
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
    output_schema: dict[str, Any] | None = Field(
        default=None, description="As `return` in the chat route.", examples=[{"type": "string"}]
    )
    defer_loading: bool = Field(
        default=False,
        description="`true`: where the client has a `tool_search`, the model sees the tool once that has found it.",
        examples=[False],
    )
    allowed_callers: Items[str] | None = Field(
        default=None, description="Must hold `direct`: the model calls all tools itself.", examples=[["direct"]]
    )
    format: dict[str, Any] | None = Field(
        default=None, description="Of a `custom` tool's input. Only `text` is enforced.", examples=[{"type": "text"}]
    )
    tools: Items[ResponsesTool] = Field(default_factory=list, description="Of a `namespace`.", examples=[[]])
    execution: str | None = Field(
        default=None, description="Of a `tool_search`: served where it is `client`.", examples=["client"]
    )

    @model_validator(mode="before")
    @classmethod
    def _is_whole_only_if_served(cls, data: Any) -> Any:
        """Leave out the fields of what is left out."""
        if isinstance(data, dict) and isinstance(kind := data.get("type"), str) and kind not in _SERVED_TOOLS:
            return {"type": kind}
        return data

    @model_validator(mode="after")
    def _has_its_name(self) -> ResponsesTool:
        check_callers(self.allowed_callers)
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
    if isinstance(kind, str) and kind in get_args(HostedItem.model_fields["type"].annotation):
        return "web_search_call"
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
_Hosted = Annotated[HostedItem, Tag("web_search_call")]
Item = Annotated[
    _Message | _Call | _CustomCall | _Output | _Reasoning | _Reference | _Tools | _Search | _Found | _Hosted,
    Discriminator(_kind),
]

ENCRYPTED: Final = "reasoning.encrypted_content"
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
