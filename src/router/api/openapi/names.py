"""The names of the document's schemas and operations: TGI's where it has one, for clients that are generated."""

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

_SAGEMAKER = "/invocations", "SagemakerRequest"
TGI_TITLE = "Text Generation Inference"
"""The document's, and the tag of its operations."""

_TGI_OPERATIONS = {
    ("/", "post"): "compat_generate",
    ("/chat_tokenize", "post"): "get_chat_tokenize",
    ("/generate", "post"): "generate",
    ("/generate_stream", "post"): "generate_stream",
    ("/health", "get"): "health",
    ("/info", "get"): "get_model_info",
    ("/invocations", "post"): "sagemaker_compatibility",
    ("/metrics", "get"): "metrics",
    ("/tokenize", "post"): "tokenize",
    ("/v1/chat/completions", "post"): "chat_completions",
    ("/v1/completions", "post"): "completions",
    ("/v1/models", "get"): "openai_get_model_info",
    ("/vertex", "post"): "vertex_compatibility",
}


def name_operation(path: str, method: str, operation: dict[str, Any]) -> None:
    """Give an operation of TGI's the name and the tag by which generators call method and class."""
    name = _TGI_OPERATIONS.get((path, method))
    if name is not None:
        operation["operationId"] = name
        operation["tags"] = [TGI_TITLE]


def name_request(paths: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Give SageMaker's body, one of three, a name."""
    path, name = _SAGEMAKER
    if path in paths:
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        schemas[name] = {"title": name, **content["schema"]}
        content["schema"] = {"$ref": _PLACE + name}


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
