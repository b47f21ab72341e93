"""The names of the document's schemas: TGI's where it has one, so that generated clients keep their classes."""

from __future__ import annotations

from typing import Any

_PLACE = "#/components/schemas/"
TGI_NAMES = {
    "AnsweredCall": "ToolCall",
    "AssistantMessage": "OutputMessage",
    "CallDelta": "DeltaToolCall",
    "ChatBody": "ChatRequest",
    "ChatChoice": "ChatCompletionComplete",
    "ChatChunk": "ChatCompletionChunk",
    "ChatChunkChoice": "ChatCompletionChoice",
    "ChatDelta": "ChatCompletionDelta",
    "ChoiceLogprobs": "ChatCompletionLogprobs",
    "CompatBody": "CompatGenerateRequest",
    "Completion": "CompletionFinal",
    "CompletionBody": "CompletionRequest",
    "CompletionChoice": "CompletionComplete",
    "CompletionChunk": "Chunk",
    "ErrorBody": "ErrorResponse",
    "FunctionDelta": "Function",
    "GenerateBody": "GenerateRequest",
    "Grammar": "GrammarType",
    "ImageUrl": "Url",
    "ModelCard": "ModelInfo",
    "PrefillTokenModel": "PrefillToken",
    "StreamEvent": "StreamResponse",
    "TokenLogprob": "ChatCompletionLogprob",
    "TokenModel": "Token",
    "TokenSpan": "SimpleToken",
    "ToolCall": "MessageToolCall",
    "TopLogprob": "ChatCompletionTopLogprob",
    "VertexBody": "VertexRequest",
}
"""Of our classes; `ToolCall`, of a request, makes room for the one of an answer."""


def renamed(value: Any) -> Any:
    """Return a schema that refers to others by their names in the document."""
    if isinstance(value, list):
        return [renamed(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {name: renamed(one) for name, one in value.items()}
    if isinstance(place := found.get("$ref"), str):
        name = place.removeprefix(_PLACE)
        found["$ref"] = _PLACE + TGI_NAMES.get(name, name)
    return found
