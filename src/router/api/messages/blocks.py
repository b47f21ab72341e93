"""Blocks of Anthropic's messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from router.errors import FieldError
from router.schemas.base import Body, TextOrItems


class TextBlock(Body, place="messages content"):
    """A text."""

    type: Literal["text"] = Field(description="The kind of block.", examples=["text"])
    text: str = Field(description="Blocks of text are joined as they are.", examples=["Hello"])


class ImageSource(Body, place="messages content"):
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


class ImageBlock(Body, place="messages content"):
    """An image, served as far as the chat route serves images."""

    type: Literal["image"] = Field(description="The kind of block.", examples=["image"])
    source: ImageSource = Field(
        description="The image.", examples=[{"type": "url", "url": "https://example.com/a.png"}]
    )


class ToolUseBlock(Body, place="messages content"):
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


class SearchResultBlock(Body, place="messages content"):
    """What the client has found; the model reads its title, source and texts."""

    type: Literal["search_result"] = Field(description="The kind of block.", examples=["search_result"])
    source: str = Field(description="Where it is from.", examples=["https://example.com/a"])
    title: str = Field(description="Its title.", examples=["Weather"])
    content: list[TextBlock] = Field(description="Its texts.", examples=[[{"type": "text", "text": "Sunny"}]])
    citations: Citations | None = Field(default=None, description="Absent: none.", examples=[{"enabled": False}])


class DocumentSource(Body, place="messages content"):
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


class DocumentBlock(Body, place="messages content"):
    """A document of the client; the model reads its title, what is said of it, and its content."""

    type: Literal["document"] = Field(description="The kind of block.", examples=["document"])
    source: DocumentSource = Field(description="The document.", examples=[{"type": "text", "data": "Paris"}])
    title: str | None = Field(default=None, description="Its title.", examples=["Cities"])
    context: str | None = Field(default=None, description="What is said of it.", examples=["From an atlas."])
    citations: Citations | None = Field(default=None, description="Absent: none.", examples=[{"enabled": False}])


class ToolReferenceBlock(Body, place="messages content"):
    """A tool that a search for tools has found; the model reads its name."""

    type: Literal["tool_reference"] = Field(description="The kind of block.", examples=["tool_reference"])
    tool_name: str = Field(description="One of `tools`.", examples=["get_weather"])


class ServerToolUseBlock(Body, place="messages content"):
    """A call of a tool on Anthropic's or MCP's servers, in an earlier turn; the model reads it as text."""

    type: Literal["server_tool_use", "mcp_tool_use"] = Field(
        description="The kind of block.", examples=["server_tool_use"]
    )
    name: str = Field(description="The tool.", examples=["web_search"])
    input: dict[str, Any] = Field(default_factory=dict, description="Its arguments.", examples=[{"query": "Paris"}])


class ServerToolResultBlock(Body, place="messages content"):
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


class ToolResultBlock(Body, place="messages content"):
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


class ThinkingBlock(Body, place="messages content"):
    """Reasoning of an earlier turn; the chat template decides whether the model sees it again."""

    type: Literal["thinking"] = Field(description="The kind of block.", examples=["thinking"])
    thinking: str = Field(description="The text.", examples=["2 + 3 = 5"])


class RedactedThinkingBlock(Body, place="messages content"):
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
